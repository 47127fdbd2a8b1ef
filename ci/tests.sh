#!/usr/bin/env bash
# Runs mypy and all tests, in parts; those of the site in containers (make test-site) with HPCGPU_TEST_SITE=yes in the environment, and those
# of the plugins on their daemons (make test-plugins) with HPCGPU_TEST_PLUGINS=yes. Three parts with whole clusters for each core run at a
# time, since these wait for most of their time. What computes all the time, such as the fast tests, runs beside them with what they
# leave of the cores: it makes none of them slower. The output of each part comes at its end, with the time that it took. Fails if any does,
# and says at the end what failed.
set -u
cd "$(dirname "$0")/.." || exit
export PYTHONDONTWRITEBYTECODE=  # else each process that a test starts compiles hpcgpu anew

# Files that take a minute and more, the longest first.
long=(
    ssh/test_suspended_laptops ssh/test_notebook_by_ssh
    local/test_restarted_scheduler local/test_scheduler_before_walltime local/test_in_containers local/test_adaptive browser/test_notebook
    local/test_calls local/test_cluster local/test_pbs_cluster local/test_outlive browser/test_dashboard_frame local/test_cli
    local/test_replay local/test_listeners local/test_jupyter_server local/test_kernels local/test_safety local/test_lost_workers
    local/test_authenticated local/test_pbs_scaling browser/test_stored local/test_wanted_data local/test_notify local/test_hold
    local/test_worker_start local/test_checkpoints local/test_other_programs local/test_plugin local/test_published_datasets
    local/test_dask_cuda_benchmarks local/test_check browser/test_page local/test_libraries local/test_budget local/test_upload_package
    local/test_local_queue ssh/test_cluster_by_ssh ssh/test_broken_connections ssh/test_values_by_ssh
    ssh/test_bad_cases ssh/test_windows_and_macos_laptops
)

test=".venv/bin/python -m pytest"

# The parts with whole clusters, a command in each line. What takes longest comes first.
parts() {
    local slurm=tests/slurm/test_slurm file rest=()
    [ "${HPCGPU_TEST_SITE-}" != yes ] || echo ci/test-site.sh 1800
    echo "$test" tests/slurm --ignore="${slurm}_cluster.py" --ignore="${slurm}_scaling.py" # one Slurm for each of these three
    echo "$test" "${slurm}_cluster.py"
    echo "$test" "${slurm}_scaling.py"
    [ "${HPCGPU_TEST_PLUGINS-}" != yes ] || printf "$test %s\n" plugins/*/tests/*_daemons.py
    echo "$test" tests/docs
    printf "$test tests/%s.py\n" "${long[@]}"
    # The dry run looks for mistakes in these tests. Other tests have UCX, which computes while it waits.
    echo .venv/bin/python tests/gpu/run.py --dry-run -k "'not ucx'"
    for file in tests/{local,browser,ssh}/test_*.py; do
        file=${file#tests/}
        [[ " ${long[*]} " == *" ${file%.py} "* ]] || rest+=("tests/$file")
    done
    printf '%s\n' "${rest[@]}" | xargs -n 3 echo "$test"
}

# The parts that compute all the time.
computing() {
    echo "$test" tests/unit --ignore-glob='tests/unit/test_[p-z]*'
    echo "$test" tests/unit --ignore-glob='tests/unit/test_[a-o]*'
    # What needs Python alone is the same with the oldest releases of others. Types and shell scripts need tools that are not there.
    local once=(adaptive_policy checked_files container create_directory damage decide_actions demo each_job histories layers
        next_scheduler_job option_values ownership profiles promises public_names ran reconciler repository right_words stage_attacks
        stage_unpacking standby tpch typed scripts upstream wheel)
    once=("${once[@]/#/--ignore=tests/unit/test_}")
    echo .venv-lowest/bin/python -m pytest tests/canaries tests/unit -p no:cacheprovider "${once[@]/%/.py}"
    echo "$test" tests --ignore=tests/slurm --ignore=tests/local --ignore=tests/docs --ignore=tests/browser --ignore=tests/ssh \
        --ignore=tests/site --ignore=tests/unit
    echo "$test" plugins --ignore-glob='*_daemons.py' # those are parts with whole clusters
    echo .venv/bin/python -m mypy
}

# Runs a command. The oldest releases are installed while other parts run.
run() {
    [ "$1" != .venv-lowest/bin/python ] || ci/environment.sh lowest || return
    "$@"
}

# Runs a part. Its output is not mixed with that of others.
part() {
    local log code TIMEFORMAT="== %0R s, of which it computed %0U s and the kernel %0S s"
    log=$(mktemp)
    { time run "$@" > "$log" 2>&1; } 2>> "$log"
    code=$?
    [ "$code" != 75 ] || code=0 # there can be no site here, as the log says
    flock ci/tests.sh cat - "$log" <<< "== $*"
    [ "$code" = 0 ] || { echo "== $*" && { grep -E '^(E  |FAILED|ERROR) ' "$log" || cat "$log"; } | tail -n 30 | cut -c 1-300; } >> "${failed-/dev/null}"
    rm -f "$log"
    return "$code"
}

if [ $# -gt 0 ]; then
    part "$@"
    exit
fi
failed=$(mktemp)
export failed
trap 'cat "$failed" && grep "^== " "$failed"; rm -f "$failed"' EXIT
export PYTEST_ADDOPTS="--durations=12 --durations-min=10"
set -m # job control: without it what runs in the background ignores SIGINT, and so would all that the tests start
parts | xargs -P "$((3 * $(nproc)))" -L 1 ci/tests.sh &
all=$!
computing | nice -n 5 xargs -P "$(nproc)" -L 1 ci/tests.sh &
beside=$!
trap 'kill -INT %1 %2 2> /dev/null' INT TERM
wait "$all"
code=$?
wait "$beside" && exit "$code"
