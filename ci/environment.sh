#!/usr/bin/env bash
# Makes a virtual environment with hpcgpu (editable) and one of its extras. Usage: ci/environment.sh EXTRA|lowest
# EXTRA goes into .venv. `lowest` is the extra `fast` with the oldest supported releases (ci/lowest.txt); it goes into .venv-lowest.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=$1
venv=.venv
oldest=()
if [ "$extra" = lowest ]; then
    extra=fast
    venv=.venv-lowest
    oldest=(--no-compile --constraint ci/lowest.txt) # Python compiles what the tests import, which is less than half of the files
fi

stamp=$venv/.installed-$extra
if [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && [ ! ci/lowest.txt -nt "$stamp" ]; then
    exit 0
fi

python=
candidates=(python3 python3.13 python3.12 python3.11)
# The distribution's Python is built with optimizations, which pyenv's lacks: the tests compute for a tenth less time.
if [[ $extra =~ ^(test|fast)$ ]] && /usr/bin/python3 -c 'import ensurepip' 2> /dev/null; then
    candidates=(/usr/bin/python3 "${candidates[@]}")
fi
for candidate in "${candidates[@]}"; do
    if command -v "$candidate" > /dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        python=$candidate
        break
    fi
done

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# Ends with what is missing and the ways out.
cannot() {
    cat >&2 << EOF
hpcgpu: $1
Ways out:
  - install uv, which needs no root (https://docs.astral.sh/uv), and run this command again: it takes uv where it is on the PATH;
  - or ask an administrator for $2.
EOF
    exit 1
}

if command -v uv > /dev/null; then
    [ -d "$venv" ] || uv venv --quiet --python '>=3.11' "$venv"
    uv pip install --quiet --python "$venv/bin/python" ${oldest[@]+"${oldest[@]}"} --editable ".[$extra]"
else
    if [ -z "$python" ]; then
        cannot "it needs Python 3.11 or later, and this machine has none." "Python 3.11 or later, with its module venv"
    fi
    if [ ! -x "$venv/bin/pip" ]; then
        # Debian and Ubuntu split venv from Python.
        if ! "$python" -c 'import ensurepip' 2> /dev/null; then
            if ! command -v apt-get > /dev/null; then
                cannot "$python cannot make virtual environments: its module ensurepip is missing." "Python's module venv"
            elif ! as_root true 2> /dev/null; then
                cannot "the package python3-venv is missing, and this user may not install it: not root, and no sudo without a password." \
                    "the package python3-venv (apt-get install python3-venv)"
            fi
            echo "installing Debian's python3-venv"
            as_root apt-get update -qq
            as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv
        fi
        "$python" -m venv --clear "$venv"
    fi
    echo "installing hpcgpu[$extra] into $venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check ${oldest[@]+"${oldest[@]}"} --editable ".[$extra]"
fi
touch "$stamp"
