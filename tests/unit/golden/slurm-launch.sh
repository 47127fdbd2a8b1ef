#!/usr/bin/env bash
# Starts the hpcgpu cluster demo:  /home/me/clusters/demo/launch.sh [JOBS]
# Submits the scheduler job, and JOBS (default 1) worker jobs behind it. While the scheduler job is in the queue, adds JOBS worker jobs.
# Exit status: 0 if all was submitted, 1 if not, 2 if what was asked for cannot be.
set -u
umask 077
directory=/home/me/clusters/demo
name=demo
journal=$directory/journal.jsonl
if [ ! -e "$directory/cluster.json" ]; then
    echo "$directory has no cluster.json: if the directory was moved, move it back, or render into a new one" >&2
    exit 2
fi

# The journal is what `hpcgpu list`, `hpcgpu stop` and from_name read.
record() {
    printf '{"time": %s, %s}\n' "$(date +%s)" "$1" >> "$journal"
}

# Name and id of each job.
submitted() {
    [ ! -e "$journal" ] || sed -n 's/.*"event": "submitted", "name": "\([^"]*\)", "id": "\([^"]*\)".*/\1 \2/p' "$journal"
}
# Variables that override the scripts' directives or change what Slurm's commands answer, and GPUs of a job that this may run in.
for variable in CUDA_VISIBLE_DEVICES "${!SBATCH_@}" "${!SLURM_@}" "${!SALLOC_@}" "${!SRUN_@}" "${!SQUEUE_@}" "${!SCANCEL_@}"; do
    case $variable in
        SLURM_CONF | SLURM_CONF_SERVER | SLURM_JWT | SLURM_SACK_SOCKET) ;;
        *) unset "$variable" ;;
    esac
done

queue_cancel() {
    scancel "$@"
}

queue_submit() {
    sbatch --parsable --job-name="$1" ${4:+"--dependency=after:$4"} "$3"
}

job_id_of() {
    printf '%s\n' "$1" | sed -n 's/^\([0-9][0-9]*\)\(;.*\)\{0,1\}$/\1/p' | tail -n 1
}

# Prints something if the job is in the queue.
queue_alive() {
    local answer
    if ! answer=$(squeue --noheader --jobs="$1" --states=PENDING,CONFIGURING,RUNNING,SUSPENDED --format=%i 2>&1); then
        case $answer in
            *"nvalid job id"*) return 0 ;;
        esac
        echo "the queue does not answer: $answer" >&2
        return 1
    fi
    printf '%s' "$answer"
}

# submit_and_record NAME KIND SCRIPT [ID that must have started before]
submit_and_record() {
    local id answer code
    record "\"event\": \"intent\", \"name\": \"$1\", \"kind\": \"$2\", \"group\": \"default\"" || return
    answer=$(queue_submit "$@")
    code=$?
    id=$(job_id_of "$answer")
    if [ -z "$id" ]; then
        if [ "$code" -eq 0 ]; then
            echo "launch.sh: $2 job $1 may be in the queue, whose answer has no id of a job: $answer" >&2
            echo "launch.sh: 'stop.sh --list' prints the jobs of this cluster, and stop.sh cancels them" >&2
        else
            echo "launch.sh: $2 job $1 was not submitted${answer:+: $answer}" >&2
        fi
        return 1
    fi
    if ! record "\"event\": \"submitted\", \"name\": \"$1\", \"id\": \"$id\""; then
        echo "launch.sh: $2 job $id ($1) is cancelled: its id could not be written into $journal" >&2
        queue_cancel "$id"
        return 1
    fi
    echo "$2 job $id ($1)" || : # it is submitted also if nobody can read so
}

# submit NAME KIND SCRIPT [ID that must have started before]
# No $(command) stands in it: bash 5.2 loses an interrupt that comes as such a command ends.
submit() {
    local line id=
    [ -z "$stopping" ] || interrupted
    # An interrupt must not end the command half-way: what it submitted would not be known.
    if ! (trap '' INT TERM HUP; submit_and_record "$@"); then
        [ -z "$stopping" ] || interrupted
        return 1
    fi
    while IFS= read -r line; do
        case $line in
            *"\"event\": \"submitted\", \"name\": \"$1\", \"id\": "*) id=${line#*\"id\": \"} && id=${id%%\"*} ;;
        esac
    done < "$journal"
    mine+=("$id")
    [ -z "$stopping" ] || interrupted
    [ "$2" = worker ] || scheduler=$id
}

mine=()
stopping=
interrupted() {
    trap '' INT TERM HUP # a second interrupt must not end the cancel
    echo "launch.sh: interrupted; what it submitted is cancelled: ${mine[*]:-nothing}" >&2
    [ "${#mine[@]}" -eq 0 ] || queue_cancel "${mine[@]}"
    exit 130
}
trap stopping=1 INT TERM HUP

jobs=${1:-1}
case $jobs in
    '' | *[!0-9]*)
        echo "launch.sh: '$jobs' is not a number of worker jobs: write a whole number, such as 3" >&2
        exit 2
        ;;
esac
if [ ! -e "$directory/tls/ucx.key" ]; then
    echo "launch.sh: this cluster was stopped and its credentials were removed: render it into another directory" >&2
    exit 2
fi

scheduler=$(submitted | sed -n "s/^$name-scheduler //p" | tail -n 1)
if [ -n "$scheduler" ]; then
    alive=$(queue_alive "$scheduler") || exit 1
    [ -n "$alive" ] || scheduler=
fi
if [ -z "$scheduler" ]; then
    if [ -e "$journal" ]; then
        left=$("$directory/stop.sh" --list) || exit 1
        if [ -n "$left" ]; then
            echo "launch.sh: jobs of an earlier launch are still in the queue: $(echo "$left" | tr '\n' ' ')- run $directory/stop.sh first" >&2
            exit 1
        fi
    fi
    rm -f "$directory/contact.json" "$directory/scheduler.json"
    [ ! -e "$journal" ] || mv "$journal" "$directory/journal~$(date +%Y%m%d-%H%M%S).jsonl"
    submit "$name-scheduler" scheduler "$directory/scheduler.sbatch" || exit 1
fi
last=$(sed -n "s/.*\"event\": \"intent\", \"name\": \"$name-\([0-9][0-9]*\)\".*/\1/p" "$journal" | sort -n | tail -n 1)
number=$((${last:--1} + 1))
for ((i = 0; i < jobs; i++)); do
    submit "$name-$((number + i))" worker "$directory/worker.sbatch" "$scheduler" || exit 1
done
echo "Logs:    "/home/me/clusters/demo/logs
echo "Connect: see $directory/README. It needs $directory/contact.json, which exists once the scheduler runs"
echo "End it:  $directory/stop.sh"
