# shellcheck shell=bash
# The environment of the other scripts, .venv in the checkout. To be sourced: `ensure_env ""` or `ensure_env dev`
# makes it or brings it up to date, and returns with "$venv/bin/python" ready to run. After `use_versions` the
# environment is another one, beside .venv, in which the versions of some packages are fixed. `ensure_harnesses` makes
# one that has the packages of .venv, torch among them, and in front of them what the harnesses of language models need.

root=$(cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." > /dev/null && pwd)
venv=$root/.venv
stamp=$venv/.hookrun # what is installed: written last; until then it says "unfinished"

fixed="" # lines for a constraints file, which pip and uv both read

# use_versions oldest: the lower bound of every direct dependency, also of the extras; use_versions 2.12: that torch
use_versions() {
    venv=$root/.venv-$1
    if [[ $1 == oldest ]]; then
        fixed=$(grep -oE '"[A-Za-z0-9._-]+>=[0-9.]+' "$root/pyproject.toml" | sed 's/"//; s/>=/==/' | sort -u)
    elif [[ $1 =~ ^[0-9]+(\.[0-9]+)*$ ]]; then
        venv=$root/.venv-torch-$1
        fixed="torch==$1.*"
    else
        die "--torch $1: expected a version of torch, such as 2.12"
    fi
    stamp=$venv/.hookrun
}

seen="" # an environment whose packages this one has too

say() { printf 'hookrun: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# An editable install points at its checkout: a copy of it needs an environment of its own, and so does another Python.
made_for() { "$venv/bin/python" -ISc 'import sys; print(*sys.version_info[:2], *sys.argv)' "$root" 2> /dev/null; }
contents() { printf '%s\n' "$(made_for)" "extra: $1" "$(< "$root/pyproject.toml")"; }
is_ready() { [[ -e $stamp && ($(< "$stamp") == "$(contents "$1")" || $(< "$stamp") == "$(contents dev)") ]]; }

choose_python() {
    local usable='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
    local PATH=${PATH//"$venv/bin:"/} # an active .venv is about to be made anew
    for python in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3 python; do
        "$python" -Ic "$usable" &> /dev/null && python=$(command -v "$python") && return
        [[ $python != "${PYTHON:-}" ]] || say "PYTHON=$python cannot be used; looking for another Python"
    done
    die "needs Python 3.11 or newer, with venv (on Debian and Ubuntu: apt install python3-venv)," \
        "but not 3.14, on which Hydra does not start. Install one, or name it: PYTHON=/path/to/python3.13"
}

install() {
    local what=(--editable ".${1:+[$1]}")
    [[ -t 2 ]] || what+=(--quiet)
    if [[ -n $fixed ]]; then
        printf '%s\n' "$fixed" > "$venv/constraints.txt"
        what+=(--constraint "$venv/constraints.txt")
    fi
    if [[ -z $seen ]] && command -v uv > /dev/null; then # uv would install once more what is seen
        uv pip install --python "$venv/bin/python" "${what[@]}" >&2 && return
        say "uv could not install; trying pip" # it reads none of pip's settings
    fi
    PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check "${what[@]}" >&2
}

make_env() {
    local before=unfinished
    [[ -e $stamp || -z $(ls -A "$venv" 2> /dev/null) ]] ||
        die "$venv was not made by scripts/ and is left alone. Move it away and start again, or use it:" \
            "$venv/bin/python -m hookrun"
    local owner=
    [[ ! -L $venv || ! -e $stamp ]] || read -r _ _ _ owner < "$stamp"
    [[ -z $owner || $owner == "$root" || ! -d $owner ]] ||
        die "$venv is a link to an environment that belongs to $owner and is left alone." \
            "Remove the link to get an environment here, or use it: $venv/bin/python -m hookrun"
    if [[ -e $stamp && $(head -n 1 "$stamp") == "$(made_for)" ]]; then
        say "updating ${venv##*/}"
        before=$(< "$stamp")
        echo unfinished > "$stamp"
    else
        if [[ -n $seen ]]; then
            python=$seen/bin/python
            say "making ${venv##*/}, which has the packages of ${seen##*/} too: once, a minute"
        else
            choose_python
            say "making ${venv##*/} and installing PyTorch into it: once, some minutes and GB"
        fi
        mkdir -p "$venv"
        echo unfinished > "$stamp"
        find "$venv/" -mindepth 1 ! -name .hookrun -delete
        "$python" -m venv "$(readlink -f -- "$venv")" >&2 # venv refuses a symbolic link
        [[ -z $seen ]] || (cd -- "$venv"/lib/python3.*/site-packages && echo "$seen"/lib/python3.*/site-packages > seen.pth)
    fi
    if ! install "$1"; then
        echo "$before" > "$stamp"
        die "the installation failed, see above; the next start tries again"
    fi
    contents "$1" > "$stamp"
}

ensure_env() {
    if is_ready "$1"; then return; fi
    (
        trap 'exit 130' INT # pip answers an interrupt with an ordinary failure; nothing may follow it
        cd -- "$root" || exit
        flock 9 2> /dev/null || say "cannot lock ${venv##*/} here: start one at a time"
        is_ready "$1" || make_env "$1" # another start may have made it
    ) < /dev/null 9>> "$venv.lock"
}

ensure_harnesses() {
    ensure_env dev
    seen=$venv
    venv=$root/.venv-harnesses
    stamp=$venv/.hookrun
    ensure_env inspect,lm-eval
}
