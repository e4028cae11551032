"""The compiled library is found again; a damaged one or another user's is not loaded; nothing here is an error."""

from __future__ import annotations

import functools
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hookrun
from hookrun.kernels import NoLibrary, build, statistics
from hookrun.kernels.build import library

SOURCE = "int answer(void) { return 42; }\n"


def has_compiler() -> bool:
    try:
        build._compiler()
    except NoLibrary:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler on this machine")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hookrun" / "kernels"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


def compiler_of(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """The only compiler on the PATH."""
    path = folder / "bin" / "cc"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


@needs_compiler
def test_a_library_is_compiled_once_and_is_the_user_s_own(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = library(source)
    assert first.parent == cache and not stat.S_IMODE(cache.stat().st_mode) & 0o077
    monkeypatch.setattr(build, "_run", lambda *_: pytest.fail("it was compiled again"))
    assert library(source) == first
    assert [path.name for path in cache.iterdir()] == [first.name]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    source.write_text(SOURCE.replace("42", "43"))
    assert library(source) != first


@needs_compiler
def test_a_damaged_library_is_compiled_again(cache: Path, source: Path) -> None:
    first = library(source)
    content = first.read_bytes()
    for damaged in (b"", content[:1000], content[:-1] + b"\1"):
        first.write_bytes(damaged)
        again = library(source)
        assert build._digest(again) in again.name and len(list(cache.glob("*.so"))) == 1


@needs_compiler
def test_a_library_that_other_users_may_write_is_not_used(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = library(source)
    first.chmod(0o622)
    with pytest.raises(NoLibrary, match="nobody else"):
        library(source)
    first.chmod(0o600)
    cache.chmod(0o777)
    with pytest.raises(NoLibrary, match="nobody else"):
        library(source)
    cache.chmod(0o700)
    cache.parent.chmod(0o777)
    with pytest.raises(NoLibrary, match="can be changed by others"):
        library(source)
    cache.parent.chmod(0o700)
    link = tmp_path / "link" / "hookrun"
    link.mkdir(parents=True)
    (link / "kernels").symlink_to(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(link.parent))
    with pytest.raises(NoLibrary, match="own"):
        library(source)


def test_nothing_is_written_into_a_directory_of_another_user(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_of(monkeypatch, tmp_path, "exit 1")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(home, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # as under sudo, where HOME is still the user's
    monkeypatch.setenv("HOME", str(home))
    for named in ("", str(home / "a" / "b")):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        with pytest.raises(NoLibrary, match="can be changed by others"):
            library(source)
        assert not list(home.iterdir())


def test_a_compiler_that_fails_or_hangs_is_called_once(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SECONDS", 0.3)
    for script, said in (
        ("echo no good >&2; exit 1", "no good"),
        ("sleep 100 & sleep 100", "more than 0.3 seconds"),
    ):
        compiler_of(monkeypatch, tmp_path, script)
        with pytest.raises(NoLibrary, match=said):
            library(source)
        with pytest.raises(NoLibrary, match="within the last hour"):
            library(source)
    assert not [path for path in cache.iterdir() if path.suffix != ".failed"]
    compiler_of(monkeypatch, tmp_path, "exit 0")
    with pytest.raises(NoLibrary, match="it wrote no file and no message"):
        library(source)


@needs_compiler
def test_a_compiler_that_does_not_know_an_option_is_used_without_it(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = build._compiler()
    compiler_of(monkeypatch, tmp_path, f'case "$*" in *openmp*) exit 1;; *) exec {real} "$@";; esac')
    assert library(source).is_file()


def test_an_unusable_cache_is_not_an_error(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler_of(monkeypatch, tmp_path, "exit 1")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(NoLibrary, match="no cache directory"):
        library(source)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/proc/nowhere")
    with pytest.raises(NoLibrary, match="no cache directory"):
        library(source)


def test_statistics_are_torch_s_without_a_compiler_and_if_switched_off(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="hookrun")
    spec = {"s": {"select": "0", "hook": "forward", "action": "stats"}}
    for name, value, said in (
        ("PATH", "", "no C compiler"),
        ("HOOKRUN_KERNELS", "0", "HOOKRUN_KERNELS is 0"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            changed.setattr(
                statistics, "_kernel", functools.cache(statistics._kernel.__wrapped__)
            )  # as at the start of a process
            with hookrun.hooked(model := nn.Sequential(nn.Identity()), spec) as hooks:
                model(torch.arange(8.0))
            record = hooks.records[0]
            assert statistics._kernel() is None and said in caplog.text
            assert (record["mean"], record["max"]) == (3.5, 7.0)


@needs_compiler
def test_processes_that_start_at_once_all_load_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    code = "from pathlib import Path; from hookrun.kernels import build; print(build.library(Path({!r})))"
    source = tmp_path / "answer.c"
    source.write_text(SOURCE)
    command = [sys.executable, "-c", code.format(str(source))]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    paths = [process.communicate()[0].strip() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert all(Path(path).is_file() for path in paths)
    assert not [path for path in (tmp_path / "hookrun" / "kernels").iterdir() if path.suffix != ".so"]
