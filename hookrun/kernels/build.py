"""Compile a C file into the user's cache directory, once per machine, and reuse it from there.

The library is loaded into the process, so it must be the file that this user compiled: its directory belongs to the
user and nobody else may write to it, and the name of the library holds the hash of its content.
"""

from __future__ import annotations

import grp
import hashlib
import os
import platform
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hookrun.kernels import NoLibrary

SECONDS = 20.0
"""A compiler that takes longer is stopped. Compiling takes half a second, and more on a busy machine."""

_AGAIN_AFTER = 3_600.0
"""Seconds after which a compiler that failed is tried once more."""

_FLAGS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread")
"""None of these flags changes results with NaN or infinity."""


def library(source: Path) -> Path:
    """The path of the compiled file. Raises NoLibrary without a working compiler or a usable cache directory."""
    compiler = _compiler()
    folder = _folder()
    text = source.read_bytes()
    key = _key(text, compiler)
    if (found := _found(folder, source.stem, key)) is not None:
        return found
    failed = folder / f"{source.stem}-{key}.failed"
    with suppress(FileNotFoundError):
        if time.time() - failed.stat().st_mtime < _AGAIN_AFTER:
            raise NoLibrary(f"{compiler} failed within the last hour: remove {failed} to try again")
    try:
        return _compiled(text, compiler, folder, f"{source.stem}-{key}")
    except NoLibrary as error:
        failed.write_text(f"{error}\n", encoding="utf-8")
        raise


def _compiler() -> Path:
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None and os.path.isabs(
            found
        ):  # nothing of the folder one is in
            return Path(found)  # not resolved: the link may lead to ccache, which needs this name
    raise NoLibrary("there is no C compiler (cc, gcc, clang) on the PATH")


def _key(source: bytes, compiler: Path) -> str:
    """A hash of everything the library depends on. The compiler counts by its file: asking for its version is slow."""
    there = compiler.stat()
    kind = [str(compiler), str(there.st_size), str(there.st_mtime_ns), *_FLAGS]
    machine = [sys.platform, platform.machine(), _processor()]
    return hashlib.sha256("\0".join([*kind, *machine]).encode() + source).hexdigest()[:24]


def _processor() -> str:
    """The processor's model and instruction sets, as Linux lists them; else the platform's name for the processor."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        first = file.read(1 << 14).split("\n\n")[0]
        kept = ("flags", "Features", "isa", "model name", "CPU part")
        return "\n".join(line for line in first.splitlines() if line.startswith(kept))
    return platform.processor()


def _folder() -> Path:
    """The cache directory, which belongs to this user alone. Raises NoLibrary."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        above = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
        folder = above / "hookrun" / "kernels"
        _require_unshared(next(each for each in folder.parents if each.exists()), folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise NoLibrary(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise NoLibrary(f"there is no cache directory: {error}") from error
    return folder


def require_own(path: Path) -> None:
    """Raise NoLibrary if anybody but this user and root can change the path or a directory above it."""
    me, found = os.geteuid(), path.lstat()
    if found.st_uid != me or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(found.st_mode):
        raise NoLibrary(f"{path} has to be this user's own, and writable by nobody else")
    _require_unshared(path.resolve().parent, path)


def _require_unshared(folder: Path, path: Path) -> None:
    """Raise NoLibrary if others can change the folder or a folder above it; path: the file in it, for the message."""
    folder = folder.resolve()
    for each in (folder, *folder.parents):
        found = each.stat()
        by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
        shared = (found.st_mode & stat.S_IWOTH or by_group) and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (os.geteuid(), 0) or shared:
            raise NoLibrary(f"{each}, which holds {path}, can be changed by others")


def _is_own_group(number: int) -> bool:
    """Whether the group is root's, or the private group that many systems create for each user."""
    if number == 0:
        return True
    try:
        mine, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == mine.pw_gid and group.gr_name == mine.pw_name and {*group.gr_mem} <= {mine.pw_name}


def _found(folder: Path, stem: str, key: str) -> Path | None:
    """The library of that key, if any; a damaged library is removed."""
    for path in sorted(folder.glob(f"{stem}-{key}-*.so")):
        require_own(path)
        if path.name == f"{stem}-{key}-{_digest(path)}.so":
            return path
        path.unlink(missing_ok=True)
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compiled(text: bytes, compiler: Path, folder: Path, name: str) -> Path:
    """Compile in a temporary directory, then move the result into `folder` atomically. Raises NoLibrary."""
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as own:
            source, made = Path(own, "source.c"), Path(own, "made.so")
            source.write_bytes(text)
            said = ""
            until = time.monotonic() + SECONDS
            for command in _commands(compiler, source, made):
                code, said = _run(command, own, until)
                if not code and made.is_file():
                    made.chmod(0o600)
                    place = folder / f"{name}-{_digest(made)}.so"
                    made.replace(place)
                    return place
            raise NoLibrary(f"{compiler}: {said.strip()[-1000:] or 'it wrote no file and no message'}")
    except OSError as error:
        raise NoLibrary(f"{compiler}: {error}") from error


def _commands(compiler: Path, source: Path, made: Path) -> Iterator[list[str]]:
    """The commands to try in turn: for this processor, for its architecture, and with common flags only."""
    linking = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    files = ["-o", str(made), str(source), *linking, "-lm"]
    yield [str(compiler), *_FLAGS, "-march=native", *files]
    yield [str(compiler), *_FLAGS, *files]
    yield [str(compiler), "-O2", "-fPIC", "-shared", "-pthread", *files]


def _run(command: Sequence[str], folder: str, until: float) -> tuple[int, str]:
    """The exit code and the stderr of the compiler. Raises NoLibrary if it takes too long."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": folder, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=max(until - time.monotonic(), 0.1))
        except BaseException as error:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # including its child processes
            if isinstance(error, subprocess.TimeoutExpired):
                raise NoLibrary(f"{command[0]} took more than {SECONDS:g} seconds") from None
            raise
    return process.returncode, said
