#!/usr/bin/env bash
# Runs mypy and all tests but those of the site in containers (make test-site), in parts; with HPCGPU_TEST_SITE=yes in the environment those
# too, where there can be a site. Three parts for each core run at a time, since the tests of whole clusters wait for two thirds of their
# time. The output of each part comes at its end. Fails if any of them does.
set -u
cd "$(dirname "$0")/.." || exit
export PYTHONDONTWRITEBYTECODE=  # else each process that a test starts compiles hpcgpu anew

# Files that take a minute and more, the longest first.
long=(local/test_adaptive local/test_hold local/test_outlive local/test_cluster local/test_pbs_cluster local/test_pbs_scaling browser/test_dashboard_frame
    local/test_safety local/test_libraries local/test_calls local/test_budget browser/test_stored local/test_cli local/test_other_programs local/test_notify
    local/test_restarted_scheduler local/test_scheduler_before_walltime browser/test_notebook local/test_wanted_data local/test_check local/test_jupyter_server browser/test_page local/test_in_containers
    local/test_listeners local/test_authenticated local/test_local_queue local/test_worker_start local/test_lost_workers local/test_replay
    local/test_kernels local/test_plugin local/test_dask_cuda_benchmarks local/test_upload_package local/test_checkpoints local/test_published_datasets)

# The parts, a command in each line. What takes longest comes first.
parts() {
    local test=".venv/bin/python -m pytest" slurm=tests/slurm/test_slurm file rest=()
    [ "${HPCGPU_TEST_SITE-}" != yes ] || echo ci/test-site.sh 1800
    echo "$test" tests/slurm --ignore="${slurm}_cluster.py" --ignore="${slurm}_scaling.py" # one Slurm for each of these three
    echo "$test" "${slurm}_cluster.py"
    echo "$test" "${slurm}_scaling.py"
    echo "$test" tests/unit --ignore-glob='tests/unit/test_[p-z]*'
    echo "$test" tests --ignore=tests/slurm --ignore=tests/local --ignore=tests/docs --ignore=tests/browser --ignore=tests/site \
        --ignore-glob='tests/unit/test_[a-o]*'
    # What needs Python alone is the same with the oldest releases of others. Types and shell scripts need tools that are not there.
    local once=(adaptive_policy checked_files create_directory damage each_job histories layers option_values public_names ran reconciler
        repository right_words stage_attacks stage_unpacking tpch typed scripts wheel)
    once=("${once[@]/#/--ignore=tests/unit/test_}")
    echo .venv-lowest/bin/python -m pytest tests/canaries tests/unit -p no:cacheprovider "${once[@]/%/.py}"
    echo "$test" tests/docs
    echo .venv/bin/python tests/gpu/run.py --dry-run
    printf "$test tests/%s.py\n" "${long[@]}"
    echo .venv/bin/python -m mypy
    for file in tests/{local,browser}/test_*.py; do
        file=${file#tests/}
        [[ " ${long[*]} " == *" ${file%.py} "* ]] || rest+=("tests/$file")
    done
    printf '%s\n' "${rest[@]}" | xargs -n 3 echo "$test"
}

# Runs a part. Its output is not mixed with that of others.
part() {
    local log code
    log=$(mktemp)
    "$@" > "$log" 2>&1
    code=$?
    [ "$code" != 75 ] || code=0 # there can be no site here, as the log says
    flock ci/tests.sh cat - "$log" <<< "== $*"
    rm -f "$log"
    return "$code"
}

if [ $# -gt 0 ]; then
    part "$@"
    exit
fi
export PYTEST_ADDOPTS="--durations=12 --durations-min=10"
set -m # job control: without it what runs in the background ignores SIGINT, and so would all that the tests start
parts | xargs -P "$((3 * $(nproc)))" -L 1 ci/tests.sh &
all=$!
trap 'kill -INT -- "-$all"' INT TERM
wait "$all"
