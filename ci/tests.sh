#!/usr/bin/env bash
# Runs all tests but those of the site in containers (make test-site), half of them beside the other half: the fast ones with the
# oldest supported releases, those of the real Slurm, of the pages, the browser, the clients of batch systems and what is upstream's.
# More at a time would not be faster on two cores. Fails if any of them does.
set -um  # with job control: without it what runs in the background ignores SIGINT, and so would all that the tests start
cd "$(dirname "$0")/.." || exit
python=.venv/bin/python

log=$(mktemp)
trap 'rm -f "$log"' EXIT
(
    echo "The fast tests with the oldest supported releases:"
    # What is pure takes longest, and knows no release of anybody; types and shell scripts need tools that are not there.
    .venv-lowest/bin/python -m pytest tests/canaries tests/unit -p no:cacheprovider \
        --ignore=tests/unit/test_policy.py --ignore=tests/unit/test_typed.py --ignore=tests/unit/test_scripts.py
    oldest=$?
    echo "The tests of the real Slurm:"
    "$python" -m pytest tests/slurm
    slurm=$?
    echo "The tests of the pages, the browser, the clients of batch systems and what is upstream's:"
    "$python" -m pytest tests/docs tests/browser tests/queue tests/canaries
    pages=$?
    exit $((oldest ? oldest : slurm ? slurm : pages))
) > "$log" 2>&1 &
beside=$!
trap 'kill -- "-$beside"' INT TERM
"$python" -m pytest tests --ignore=tests/slurm --ignore=tests/site --ignore=tests/docs --ignore=tests/browser --ignore=tests/queue \
    --ignore=tests/canaries
others=$?
wait "$beside"
code=$?
cat "$log"
exit $((others ? others : code))
