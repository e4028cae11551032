"""Opening the files of a run directory that may come from anybody: only regular files, and links are not followed.

A link could lead to any file of the reader, reading a pipe might wait forever, a device has no end, and a sparse file
is read as gigabytes of zeros. Each is an OSError that says what was found.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST_HOLES = 2**28
"""Bytes. A larger file of which less than 1/64 is on the disk is refused as sparse."""

_KINDS = {
    stat.S_IFLNK: "a link, and links inside a run directory are not followed",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_inside(path: Path, root: Path | None = None) -> BinaryIO:
    """Open a regular file to read its bytes.

    root: the run directory, which the caller chose; no part of `path` below it may be a link. By default the file's
          own folder.

    Raises FileNotFoundError if the file does not exist, and OSError if it is not a regular file.
    """
    root = path.parent if root is None else root
    *folders, last = path.relative_to(root).parts
    if ".." in (*folders, last):
        raise OSError(errno.EINVAL, "the path leads out of the run directory", str(path))
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in folders:
            _require_kind(os.stat(name, dir_fd=folder, follow_symlinks=False), stat.S_IFDIR, path)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        _require_kind(os.stat(last, dir_fd=folder, follow_symlinks=False), stat.S_IFREG, path)
        file = os.fdopen(
            os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb", buffering=2**16
        )
    finally:
        os.close(folder)
    try:
        info = os.fstat(file.fileno())
        _require_kind(info, stat.S_IFREG, path)  # it may have been replaced meanwhile
        if info.st_size > MOST_HOLES and info.st_blocks * 512 < info.st_size // 64:
            message = f"it has {info.st_size:,} bytes, of which only {info.st_blocks * 512:,} are on the disk"
            raise OSError(errno.EINVAL, message, str(path))
    except BaseException:
        file.close()
        raise
    return file


def is_there(path: Path) -> bool:
    """Whether the name exists, also as a broken link."""
    return os.path.lexists(path)


def size_inside(path: Path, root: Path | None = None) -> int:
    """The size in bytes of a regular file; raises as `open_inside` does."""
    with open_inside(path, root) as file:
        return os.fstat(file.fileno()).st_size


def read_inside(path: Path, root: Path | None = None, *, limit: int) -> bytes:
    """The content of a regular file. Raises OSError before reading if it has more than `limit` bytes."""
    with open_inside(path, root) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, more than the {limit:,} that are read", str(path)
            )
        return file.read(limit)


def listed_inside(root: Path, folder: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Path from `root` -> `kind_of`, for every entry below a folder of `root` that is not a folder.

    Links are listed but not followed. A missing folder gives nothing; OSError if a folder cannot be read.
    """
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            entries = sorted(os.scandir(root / here), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        for entry in entries:
            path = f"{here}/{entry.name}" if here else entry.name
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            else:
                yield path, entry.stat(follow_symlinks=False)


def kind_of(info: os.stat_result) -> str:
    """``a link …``, ``a pipe``; ``""`` for a regular file."""
    return "" if stat.S_ISREG(info.st_mode) else _KINDS.get(stat.S_IFMT(info.st_mode), "not a file")


def _require_kind(info: os.stat_result, kind: int, path: Path) -> None:
    if stat.S_IFMT(info.st_mode) == kind:
        return
    if kind == stat.S_IFDIR and stat.S_ISREG(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a folder of that path is a file", str(path))
    raise OSError(errno.EINVAL, f"it is {kind_of(info)}", str(path))
