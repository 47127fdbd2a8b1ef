#!/usr/bin/env bash
# Makes the virtual environment .venv with hpcgpu (editable) and one of its extras. Usage: ci/environment.sh EXTRA
set -euo pipefail
cd "$(dirname "$0")/.."
extra=$1

stamp=.venv/.installed-$extra
if [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ]; then
    exit 0
fi

python=
for candidate in python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" > /dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        python=$candidate
        break
    fi
done

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

if command -v uv > /dev/null; then
    [ -d .venv ] || uv venv --quiet --python '>=3.11' .venv
    uv pip install --quiet --python .venv/bin/python --editable ".[$extra]"
else
    if [ -z "$python" ]; then
        echo "hpcgpu needs Python 3.11 or later; this machine has none" >&2
        exit 1
    fi
    if [ ! -x .venv/bin/pip ]; then
        # Debian and Ubuntu split venv from Python.
        if ! "$python" -c 'import ensurepip' 2> /dev/null; then
            echo "installing Debian's python3-venv"
            as_root apt-get update -qq
            as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv
        fi
        "$python" -m venv --clear .venv
    fi
    echo "installing hpcgpu[$extra] into .venv"
    .venv/bin/pip install --quiet --disable-pip-version-check --editable ".[$extra]"
fi
touch "$stamp"
