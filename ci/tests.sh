#!/usr/bin/env bash
# Runs all tests but those of the site in containers (make test-site), in parts: more at a time than there are cores, since the tests of
# whole clusters wait for half of their time. The output of each part comes at its end. Fails if any of them does.
set -u
cd "$(dirname "$0")/.." || exit
export PYTHONDONTWRITEBYTECODE=  # else each process that a test starts compiles hpcgpu anew

# The parts, a line each: which environment, and the arguments of pytest. What takes longest comes first.
parts() {
    echo .venv tests/slurm # one Slurm for all
    echo .venv tests --ignore=tests/slurm --ignore=tests/local --ignore=tests/docs --ignore=tests/browser --ignore=tests/site
    printf '%s\n' tests/local/test_*.py | xargs -n 3 echo .venv
    echo .venv tests/docs tests/browser
    # What needs Python alone (the policy, environments that are unpacked) is the same with the oldest releases of others; types and shell
    # scripts need tools that are not there.
    echo .venv-lowest tests/canaries tests/unit -p no:cacheprovider --ignore=tests/unit/test_policy.py \
        --ignore=tests/unit/test_stage_attacks.py --ignore=tests/unit/test_stage_unpacking.py \
        --ignore=tests/unit/test_typed.py --ignore=tests/unit/test_scripts.py
}

# Runs a part. Its output is not mixed with that of others.
part() {
    local log code
    log=$(mktemp)
    "$1/bin/python" -m pytest --durations=12 --durations-min=10 "${@:2}" > "$log" 2>&1
    code=$?
    flock ci/tests.sh cat - "$log" <<< "== $*"
    rm -f "$log"
    return "$code"
}

if [ $# -gt 0 ]; then
    part "$@"
    exit
fi
set -m # job control: without it what runs in the background ignores SIGINT, and so would all that the tests start
parts | xargs -P "$(($(nproc) + 1))" -L 1 ci/tests.sh &
all=$!
trap 'kill -INT -- "-$all"' INT TERM
wait "$all"
