# shellcheck shell=bash
# The environment of the other scripts: .venv in the checkout. To be sourced; `ensure_env ""` or `ensure_env dev` makes it
# where it is missing, brings it up to date where it is stale, and returns with "$venv/bin/python" ready to run.
# .venv/.hookrun says what is installed there, and is written last; during an installation it says "unfinished".

root=$(cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." > /dev/null && pwd)
venv=$root/.venv
stamp=$venv/.hookrun

say() { printf 'hookrun: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# made_for: the Python and the checkout of the environment; an editable install points at its checkout.
made_for() { "$venv/bin/python" -I -S -c 'import sys; print(*sys.version_info[:2], *sys.argv)' "$root" 2> /dev/null; }
contents() { printf '%s\nextra: %s\n%s\n' "$(made_for)" "$1" "$(< "$root/pyproject.toml")"; }
is_ready() { [[ -e $stamp && ($(< "$stamp") == "$(contents "$1")" || $(< "$stamp") == "$(contents dev)") ]]; }

choose_python() {
    for python in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3 python; do
        "$python" -I -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' < /dev/null &> /dev/null && return
        [[ $python != "${PYTHON:-}" ]] || say "PYTHON=$python cannot be used; looking for another Python"
    done
    die "needs Python 3.11 or newer, with venv (on Debian and Ubuntu: apt install python3-venv)." \
        "Install one, or name it: PYTHON=/path/to/python3"
}

# install EXTRA: one call of a resolver, so that torch and torchvision fit each other. uv does not read pip's settings.
install() {
    local what=(--editable ".${1:+[$1]}")
    [[ -t 2 ]] || what+=(--quiet)
    if command -v uv > /dev/null; then
        uv pip install --python "$venv/bin/python" "${what[@]}" >&2 && return
        say "uv could not install; trying pip"
    fi
    PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check "${what[@]}" >&2
}

make_env() {
    local before=unfinished
    [[ -e $stamp || -z $(ls -A "$venv" 2> /dev/null) ]] ||
        die "$venv was not made by scripts/ and is left alone. Move it away and start again, or use it:" \
            "$venv/bin/python -m hookrun"
    if [[ -e $stamp && $(head -n 1 "$stamp") == "$(made_for)" ]]; then
        before=$(< "$stamp")
        say "updating .venv"
    else
        say "making .venv and installing PyTorch into it: once, some minutes and GB"
        rm -rf "$venv.old"
        [[ ! -e $venv ]] || mv "$venv" "$venv.old"
        rm -rf "$venv.old"
        mkdir "$venv"
    fi
    echo unfinished > "$stamp"
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv" >&2
    if ! install "$1"; then
        printf '%s\n' "$before" > "$stamp"
        die "the installation failed, see above; it is tried again at the next start"
    fi
    contents "$1" > "$stamp.new"
    mv "$stamp.new" "$stamp"
    say ".venv is ready"
}

ensure_env() {
    ! is_ready "$1" || return 0
    choose_python
    (
        trap 'exit 130' INT # pip answers an interrupt with an ordinary failure; nothing may follow it
        cd -- "$root" || exit
        ! command -v flock > /dev/null || flock 9 || say "this file system cannot lock .venv; start one at a time"
        is_ready "$1" || make_env "$1" # another installation may have come first
    ) < /dev/null 9>> "$root/.venv.lock"
}
