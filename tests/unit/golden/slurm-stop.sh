#!/usr/bin/env bash
# Ends the hpcgpu cluster demo: cancels every job of it, those that wait too, and none else.
# With --list it only prints those that are in the queue.
# Exit status: 0 if none is left, 1 if one may be.
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

# Whether the job NAME ID is the cluster's: it was submitted, or was to be submitted and nobody learned its id. An id alone may be another job's by now.
is_ours() {
    ! submitted | grep -qxF "$1 $2" || return 0
    [ -n "$1" ] && [ -e "$journal" ] && grep -qF "\"event\": \"intent\", \"name\": \"$1\"" "$journal" && ! submitted | grep -q "^$1 "
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

# Ids of the cluster's jobs in the queue.
queue_jobs() {
    local jobs id job
    jobs=$(squeue --me --noheader --format='%i %j') || {
        echo "stop.sh: the queue does not answer: nothing was cancelled" >&2
        return 1
    }
    while read -r id job; do
        ! is_ours "$job" "$id" || echo "$id"
    done <<< "$jobs"
}

if [ "${1-}" = --list ]; then
    queue_jobs
    exit
fi

trap 'exit 130' INT
for ((try = 0; try < 60; try++)); do
    live=$(queue_jobs) || exit 1
    if [ -z "$live" ]; then
        rm -f "$directory/contact.json" "$directory/scheduler.json"
        record '"event": "closed"'
        echo "No job of $name is left."
        exit 0
    fi
    [ "$try" -gt 0 ] || echo "Cancelling $(echo "$live" | tr '\n' ' ')"
    # shellcheck disable=SC2086  # one word for each job
    queue_cancel $live
    sleep 1
done
echo "stop.sh: still in the queue: $(echo "$live" | tr '\n' ' ')- run stop.sh again" >&2
exit 1
