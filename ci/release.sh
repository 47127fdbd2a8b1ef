#!/usr/bin/env bash
# Makes the source distribution and the wheel in dist/, installs the wheel in a new environment, and tests it in an empty directory: the
# command, then clusters on the embedded queue. Usage: ci/release.sh [VERSION], which fails if it is not the version of the package.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet build twine
rm -rf dist
"$work/build/bin/python" -m build --outdir dist .
"$work/build/bin/python" -m twine check --strict dist/*
wheel=$(echo "$PWD"/dist/hpcgpu-*.whl)
[ $# = 0 ] || [ "${wheel##*/}" = "hpcgpu-$1-py3-none-any.whl" ] || { echo "ci/release.sh: ${wheel##*/} is not version $1" >&2; exit 1; }

python3 -m venv "$work/new"
"$work/new/bin/python" -m pip install --quiet "${wheel}[fast]"
mkdir "$work/empty"
cp -r tests pyproject.toml "$work/empty" # the tests, and how pytest runs them; hpcgpu itself is the wheel's
cd "$work/empty"
"$work/new/bin/hpcgpu" --version
"$work/new/bin/hpcgpu" --help > help
"$work/new/bin/python" -c "import hpcgpu; print('tested is', hpcgpu.__file__)"
"$work/new/bin/python" -m pytest -p no:cacheprovider tests/local/test_cluster.py -k 'comes_up or scale or journal'
echo "ready: $wheel"
