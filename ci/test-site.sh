#!/usr/bin/env bash
# Runs the tests of the site in containers, and there, as an ordinary user on a login node, those of the real Slurm that have the mark on_site.
# It brings the site up where it is not, and takes down what it brought up.
# Usage: ci/test-site.sh [SECONDS]
# After SECONDS (1500) no further test begins: those are skipped, with that reason.
# Exits with 75 where there can be no site, and says why. Else with pytest's status.
set -u
cd "$(dirname "$0")/.." || exit
place=ci/slurm-docker
began=$SECONDS
not_run() { echo "The tests of the site in containers (tests/site) were not run: $*"; exit 75; }
limit=${1:-1500}
left() { # seconds; no limit is what 0 means to `timeout`
    local rest=$((limit - (SECONDS - began)))
    echo $((rest > 1 ? rest : 1))
}
why_not() { .venv/bin/python tests/site/site_bed.py; }

engine=there
timeout 20 docker version > /dev/null 2>&1 || engine=ours
before=$("$place/engine" traces)
site=there
why_not > /dev/null 2>&1 || site=ours
# shellcheck disable=SC2317,SC2329  # the trap calls it
clean() {
    [ "$site" = there ] || timeout 120 "$place/site" down
    [ "$engine" = there ] || "$place/engine" down
    diff <(echo "$before") <("$place/engine" traces) > /dev/null && return
    echo "The site in containers changed this machine (ci/slurm-docker/engine traces, before and after):"
    diff <(echo "$before") <("$place/engine" traces)
    exit 1
}
trap clean EXIT
trap 'exit 130' INT TERM HUP

timeout --foreground 300 "$place/engine" up || not_run "there is no Docker engine"
timeout --foreground "$(left)" "$place/site" up || not_run "the site did not start"
why_not || not_run "the reason is above"
export HPCGPU_TESTS_UNTIL=$(($(date +%s) + $(left)))
within() { timeout --foreground --signal INT --kill-after 300 "$(($(left) + 600))" "$@"; } # the last test may take its time
within .venv/bin/python -m pytest tests/site
site_code=$?
# shellcheck disable=SC2016  # expanded in the host
within flock "${TMPDIR:-/tmp}/${HPCGPU_SITE:-hpcgpu-site}.lock" "$place/site" exec login1 \
    timeout --signal INT --kill-after 60 "$(($(left) + 600))" env HPCGPU_TEST_SLURM=there "HPCGPU_TESTS_UNTIL=$HPCGPU_TESTS_UNTIL" bash -c '
    cd /hpcgpu && exec python -m pytest -p no:cacheprovider --basetemp ~/tests -m "on_site and not by_hand" tests/slurm'
code=$?
case " $site_code $code " in *" 124 "*) echo "A test of the site in containers did not end." ;; esac
echo "The site in containers: $((SECONDS - began)) s in all"
exit $((site_code ? site_code : code))
