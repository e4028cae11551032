"""Writing large blocks to a file without the system's page cache, which would copy them and fill with them."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import BinaryIO

from hookrun.store.files import drop_from_cache

STEP = 4096
"""Bytes. For a direct write, memory address, offset in the file and length must be multiples of it."""

LARGE = 1 << 20
"""Bytes from which a block is written at once; smaller ones go through the cache."""


class BlockWriter:
    """Appends blocks to a file.

    A large block is written directly to the disk if the system and the file system can do so and the block is aligned
    in memory and in the file; else it is written through the cache, and flushing it begins at once.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_direct = hasattr(os, "O_DIRECT")

    def write(self, data: memoryview) -> None:
        """Add a block of bytes. OSError if the disk refuses."""
        if data.nbytes < LARGE:
            self._file.write(data)
            return
        if self._is_direct and _lies_in_steps(data) and self._file.tell() % STEP == 0:
            data = data[self._written_directly(data) :]
        if data.nbytes:
            self._file.write(data)
            drop_from_cache(self._file)  # while the next block is written

    def _written_directly(self, data: memoryview) -> int:
        """The number of bytes written directly; the rest goes through the cache."""
        import fcntl

        self._file.flush()
        file, done = self._file.fileno(), 0
        stop = data.nbytes - data.nbytes % STEP
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            while (
                done < stop and done % STEP == 0
            ):  # a limit may shorten a write; writing the rest then gives the error
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
