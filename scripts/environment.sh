# Sourced by ./test, ./demo and .ci/run, from the root of the checkout: finds or makes the Python environment.
#
#   set_up EXTRAS   sets `python` to an interpreter that has autopipe with these extras (such as run,test)
#
# The environment is `.venv` in the checkout, made where it is missing and brought up to date when pyproject.toml or
# constraints.txt change. AUTOPIPE_VENV names an existing environment to use as it is instead; nothing is installed there.

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11, 3.12 or 3.13 with the venv module was found" >&2
    echo "hint: install one, such as with 'apt-get install python3 python3-venv'" >&2
    return 1
}

set_up() {
    local extras=$1 wanted stamp base
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    if [ -n "${AUTOPIPE_VENV:-}" ]; then
        python=$AUTOPIPE_VENV/bin/python
        if [ ! -x "$python" ]; then
            echo "error: AUTOPIPE_VENV=$AUTOPIPE_VENV holds no bin/python" >&2
            return 1
        fi
        return
    fi
    python=$PWD/.venv/bin/python
    stamp=.venv/set-up-$extras
    wanted=$(cat pyproject.toml constraints.txt)
    if [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base=$(find_python) || return 1
        echo "Making .venv with $("$base" --version) ..." >&2
        "$base" -m venv .venv || return 1
    fi
    echo "Installing autopipe[$extras] and what it needs into .venv (once; this takes a few minutes) ..." >&2
    "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$extras]" \
        >&2 || return 1
    printf '%s\n' "$wanted" >"$stamp"
}
