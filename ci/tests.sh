#!/usr/bin/env bash
# Runs all tests: those of the real Slurm beside the others. More at a time would not be faster on two cores. Fails if either does.
set -um  # with job control: without it what runs in the background ignores SIGINT, and so would all that the tests start
cd "$(dirname "$0")/.." || exit
python=.venv/bin/python

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m pytest tests/slurm > "$log" 2>&1 &
slurm=$!
trap 'kill "$slurm"' INT TERM
"$python" -m pytest tests --ignore=tests/slurm
others=$?
echo "The tests of the real Slurm:"
wait "$slurm"
code=$?
cat "$log"
exit $((others ? others : code))
