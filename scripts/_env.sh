# shellcheck shell=bash
# The environment of the other scripts: .venv in the checkout, made when it is missing, brought up to date when it is stale.
# To be sourced. `ensure_env ""` or `ensure_env dev` returns with "$venv/bin/python" ready to run, or ends the script.
#
# .venv/.hookrun says what is installed there, in full: the Python version, the checkout (an editable install points at
# it, so a copied .venv is of no use), the extra and pyproject.toml itself. It is written last; during an installation it
# says "unfinished", so that an interrupted one is begun anew. The whole check is one comparison and one bare `python`.

root=$(cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." > /dev/null && pwd)
venv=$root/.venv
stamp=$venv/.hookrun

say() { printf 'hookrun: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# python_version PYTHON: prints "3.12" if this command is a Python that runs; a shim on the PATH may exist and fail.
python_version() {
    "$1" -I -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' < /dev/null 2> /dev/null
}

# python_fault PYTHON: prints why no environment can be made with this command, or nothing.
python_fault() {
    local version
    command -v -- "$1" > /dev/null || { echo "not found"; return; }
    version=$(python_version "$1") || { echo "does not run"; return; }
    case $version in
        2.* | 3.[0-9] | 3.10) echo "is Python $version"; return ;;
    esac
    "$1" -I -c 'import ensurepip, venv' < /dev/null > /dev/null 2>&1 \
        || echo "is Python $version without venv (on Debian and Ubuntu: install python$version-venv)"
}

# choose_python: sets $python. Versioned names come first: a bare python3 may be newer than PyTorch knows.
choose_python() {
    local candidate fault tried=""
    for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3 python; do
        fault=$(python_fault "$candidate")
        if [[ -z $fault ]]; then
            python=$candidate
            return
        fi
        tried+=$'\n'"    $candidate: $fault"
        [[ $candidate != "${PYTHON:-}" ]] || say "PYTHON=$candidate $fault; looking for another Python"
    done
    die "needs Python 3.11 or newer; tried, in this order:$tried"$'\n'"  Install one, or name it: PYTHON=/path/to/python3"
}

# stamp_text VERSION EXTRA: what a finished installation writes.
stamp_text() { printf 'python %s\ncheckout %s\nextra %s\n%s\n' "$1" "$root" "$2" "$(< "$root/pyproject.toml")"; }

# env_state EXTRA: prints ready, outdated (install again into it), unusable (begin anew), missing or foreign.
env_state() {
    local recorded version
    if [[ ! -e $stamp ]]; then
        if [[ -n $(ls -A "$venv" 2> /dev/null) ]]; then echo foreign; else echo missing; fi
        return
    fi
    recorded=$(< "$stamp")
    version=$(python_version "$venv/bin/python") || { echo unusable; return; }
    # An explicit wish that can be met: a ready environment of another version does not fulfil it.
    if [[ -n ${PYTHON:-} && -z $(python_fault "$PYTHON") && $(python_version "$PYTHON") != "$version" ]]; then
        echo unusable
        return
    fi
    case $recorded in
        "$(stamp_text "$version" "$1")" | "$(stamp_text "$version" dev)") echo ready ;;
        "python $version"$'\n'"checkout $root"$'\n'*) echo outdated ;;
        *) echo unusable ;;
    esac
}

# lock: waits for any other installation into this .venv; held by descriptor 9, so it ends with the subshell that has it.
# Through Python, since flock(1) is not everywhere.
lock() {
    "$python" -I -S - << 'PY'
import fcntl, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("hookrun: waiting for another installation into .venv", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError as error:
    print(f"hookrun: this file system cannot lock .venv ({error}); start one at a time", file=sys.stderr)
PY
}

# install_packages EXTRA: one call of a resolver, so that torch and torchvision fit each other. Which index it asks is
# the user's own configuration; uv does not read pip's, so pip has its turn where uv fails.
install_packages() {
    local what="."
    local quiet=(--quiet)
    [[ -z $1 ]] || what=".[$1]"
    if command -v uv > /dev/null; then
        uv pip install --python "$venv/bin/python" --editable "$what" < /dev/null >&2 && return
        say "uv could not install; trying pip"
    fi
    [[ ! -t 2 ]] || quiet=()
    PIP_USER=0 "$venv/bin/python" -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check \
        --editable "$what" < /dev/null >&2
}

# install STATE EXTRA: each step checks for itself, because `set -e` does not reach into it.
install() {
    local before="unfinished"
    cd -- "$root" || return
    if [[ $1 == outdated ]]; then
        before=$(< "$stamp")
        say "updating .venv"
        echo unfinished > "$stamp" || return
    else
        say "making .venv with $("$python" -I -S -c 'import sys; print(sys.executable, sys.version.split()[0])')" \
            "and installing PyTorch into it: once, some minutes and GB"
        mkdir -p -- "$venv" && echo unfinished > "$stamp" || return
        # All but the stamp: without it, what an interrupt leaves would look like somebody else's.
        find "$venv/" -mindepth 1 -maxdepth 1 ! -name "${stamp##*/}" -exec rm -rf {} + || return
        "$python" -m venv "$venv" < /dev/null >&2 || return
    fi
    if ! install_packages "$2"; then
        printf '%s\n' "$before" > "$stamp"
        die "the installation failed, see above; it is tried again at the next start"
    fi
    stamp_text "$(python_version "$venv/bin/python")" "$2" > "$stamp.new" && mv -- "$stamp.new" "$stamp" || return
    say ".venv is ready"
}

# ensure_env EXTRA: quiet, and tens of milliseconds, when there is nothing to do.
ensure_env() {
    local state
    [[ $(env_state "$1") != ready ]] || return 0
    choose_python
    (
        trap 'exit 130' INT # pip answers an interrupt with an ordinary failure; nothing may follow it
        trap 'exit 143' TERM
        lock || exit
        state=$(env_state "$1") # another installation may have come first
        case $state in
            ready) ;;
            foreign) die "$venv was not made by scripts/ and is left alone. Move it away and start again, or use it:" \
                "$venv/bin/python -m hookrun" ;;
            *) install "$state" "$1" ;;
        esac
    ) 9>> "$root/.venv.lock" || exit
}
