"""Writing large blocks to a file without the page cache, which would copy them and displace other content."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import BinaryIO

from hookrun.store.files import drop_from_cache

STEP = 4096
"""Bytes. Direct writes need memory address, file offset and length that are multiples of this."""

LARGE = 1 << 20
"""Bytes. Blocks of at least this size are written to disk at once; smaller ones are left to the page cache."""


class BlockWriter:
    """Appends blocks to a file.

    A large block is written with direct I/O if the system supports it and the block is aligned to `STEP` in memory and
    in the file. Otherwise it goes through the page cache, and its write-back starts at once.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_direct = hasattr(os, "O_DIRECT")

    def write(self, data: memoryview) -> None:
        """Add a block of bytes. OSError where the disk refuses."""
        if data.nbytes < LARGE:
            self._file.write(data)
            return
        if self._is_direct and _lies_in_steps(data) and self._file.tell() % STEP == 0:
            data = data[self._written_directly(data) :]
        if data.nbytes:
            self._file.write(data)
            drop_from_cache(self._file)  # while the next block is written

    def _written_directly(self, data: memoryview) -> int:
        """Write as much as direct I/O allows; returns the number of bytes written."""
        import fcntl

        self._file.flush()
        file, done = self._file.fileno(), 0
        stop = data.nbytes - data.nbytes % STEP
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            while (
                done < stop and done % STEP == 0
            ):  # a size limit may cut a write short: the next write raises
                done += os.write(file, data[done:stop])
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            self._is_direct = False  # not supported by this file system or with this alignment
        finally:
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return done


def _lies_in_steps(data: memoryview) -> bool:
    if data.readonly:  # small blocks that were joined
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % STEP == 0
