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


# A job that has ended meanwhile, or is unknown, is no error.
queue_cancel() {
    qdel "$@" 2>&1 | grep -vE 'Job has finished|Unknown Job Id' >&2
}

# Attributes of a job that has not ended, one a line; nothing if it has, or if there is none.
attributes() {
    local answer status
    answer=$(qstat -f "$1" 2>&1)
    status=$?
    case $status in
        0) printf '%s\n' "$answer" | sed -e ':a' -e '$!N' -e 's/\n\t//' -e 'ta' -e 'P' -e 'D' ;;
        35 | 153) ;; # it has ended, or is unknown
        *)
            echo "the queue does not answer: $answer" >&2
            return 1
            ;;
    esac
}

# Ids of the cluster's jobs in the queue, also of those that are held for ever because the scheduler job is gone.
queue_jobs() {
    local candidates job id
    candidates=$(submitted | sed 's/.* //')
    if [ -n "$(unknown)" ]; then # perhaps a job whose id nobody learned
        candidates="$candidates $(qselect -u "$(id -un)")" || return 1
    fi
    for id in $(printf '%s\n' "$candidates" | tr ' ' '\n' | sort -u); do
        job=$(attributes "$id") || {
            echo "stop.sh: nothing more is cancelled" >&2
            return 1
        }
        job=$(printf '%s\n' "$job" | sed -n 's/.*HPCGPU_PBS_JOB=\([^,]*\).*/\1/p' | head -n 1)
        ! is_ours "$job" "$id" || echo "$id"
    done
}

# Names of jobs that were to be submitted, and of which nobody learned the id.
unknown() {
    [ -e "$journal" ] || return 0
    sed -n 's/.*"event": "intent", "name": "\([^"]*\)".*/\1/p' "$journal" | while read -r wanted; do
        submitted | grep -q "^$wanted " || printf '%s\n' "$wanted"
    done
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
