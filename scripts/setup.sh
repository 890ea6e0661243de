#!/usr/bin/env bash
# Makes .venv with `bridge` in it: finds Python >= 3.12, installs the pinned versions. Quick when nothing changed.
#
#   EXTRAS            what to install of bridge-llama (default: all; on a GPU machine all,cuda)
#   UV_TORCH_BACKEND  cpu keeps torch on its CPU build (see requirements/constraints.txt)
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${EXTRAS:-all}
constraints=requirements/constraints.txt
stamp=.venv/.bridge-setup
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300} # torch and its CUDA libraries are hundreds of megabytes a file
# A mirror that pip is told of in the environment serves uv as well.
if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}; fi

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# Prints the executable behind a name when it is CPython of at least the given version. A name that does not run, such
# as a pyenv shim of an inactive version, is passed over. Prints the base interpreter, never the one of an active
# virtual environment, which may be the very .venv that is about to be replaced.
cpython() {
    "$1" -c '
import sys
if sys.implementation.name != "cpython" or sys.version_info < tuple(map(int, sys.argv[1].split("."))):
    sys.exit(1)
print(getattr(sys, "_base_executable", None) or sys.executable)' "$2" 2>/dev/null </dev/null
}

# Where pyenv keeps its versions: said by the environment, in the home folder, or beside the shims on PATH.
pyenv_roots() {
    printf '%s\n' "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"
    printf '%s' "$PATH" | tr ':' '\n' | sed -n 's:/shims/*$::p'
}

pyenv_pythons() { # pattern of the version
    pyenv_roots | while IFS= read -r root; do
        for candidate in "$root"/versions/$1/bin/python; do
            [ ! -x "$candidate" ] || printf '%s\n' "$candidate"
        done
    done
}

# The versions that the constraints were tested with come first, whatever else is newer.
candidates() {
    printf '%s\n' python3.12 python3.13
    pyenv_pythons '3.12*'
    pyenv_pythons '3.13*'
    printf '%s\n' python3 python
    pyenv_pythons '3.1[4-9]*'
}

find_python() { # at least this version
    local name found
    while IFS= read -r name; do
        if found=$(cpython "$name" "$1"); then
            printf '%s\n' "$found"
            return 0
        fi
    done < <(candidates)
    return 1
}

# uv: the one on PATH, else one installed from PyPI into .bootstrap/ with any Python there is, even one that is too old
# for bridge. Prints nothing where it cannot be had.
find_uv() {
    local old
    if uv --version >/dev/null 2>&1 </dev/null; then
        command -v uv
    elif .bootstrap/bin/uv --version >/dev/null 2>&1; then
        printf '%s\n' "$PWD/.bootstrap/bin/uv"
    elif old=$(find_python 3.8) && rm -rf .bootstrap && "$old" -m venv .bootstrap >&2 &&
        .bootstrap/bin/python -m pip install --quiet --disable-pip-version-check uv -c "$constraints" >&2; then
        printf '%s\n' "$PWD/.bootstrap/bin/uv"
    fi
}

wanted() {
    printf '%s\n' "$PWD" "$extras" "torch ${UV_TORCH_BACKEND:-}"
    cksum setup.cfg pyproject.toml "$constraints" scripts/setup.sh bridge/__init__.py
}

if [ -x .venv/bin/bridge ] && cpython .venv/bin/python 3.12 >/dev/null && [ "$(cat "$stamp" 2>/dev/null)" = "$(wanted)" ]; then
    exit 0
fi

uv=$(find_uv)
if ! cpython .venv/bin/python 3.12 >/dev/null; then
    if ! python=$(find_python 3.12); then
        [ -n "$uv" ] || die "no Python >= 3.12 found, and no uv to fetch one: install python3.12 (with its venv module) or uv"
        say "no Python >= 3.12 found: uv python install 3.12"
        "$uv" python install 3.12 || die "uv could not fetch Python 3.12: install python3.12, then run make setup again"
        python=$("$uv" python find --managed-python 3.12)
    fi
    say "making .venv with $python"
    rm -rf .venv
    if [ -n "$uv" ]; then
        "$uv" venv --quiet --no-project --python "$python" .venv
    else
        "$python" -m venv .venv || die "$python has no venv module: install it (Debian: python3-venv), or uv"
    fi
fi

say "installing bridge-llama[$extras] with the versions of $constraints"
if [ -n "$uv" ]; then
    "$uv" pip install --python .venv/bin/python -c "$constraints" -e ".[$extras]"
else
    say "uv is not to be had: pip takes some minutes"
    .venv/bin/python -m pip install --disable-pip-version-check -c "$constraints" -e ".[$extras]"
fi
wanted >"$stamp"
say "done: .venv/bin/bridge"
