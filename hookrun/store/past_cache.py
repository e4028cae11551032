"""Large blocks to a file past the system's cache, which would copy them once more and then be full of them."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import BinaryIO

from hookrun.store.files import drop_from_cache

STEP = 4096
"""Bytes. Memory, place in the file and length of what goes to a disk directly are multiples of it."""

LARGE = 1 << 20
"""Bytes from which a block is written at once; smaller ones the system collects."""


class BlockWriter:
    """Writes one block after the other to the end of a file.

    A large block goes to the disk directly where the system and the file system can do so and the block lies in
    steps, in memory and in the file; else it begins its way to the disk at once, through the cache.
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
        """How many bytes of it are on their way; the rest is for the cache."""
        import fcntl

        self._file.flush()
        file, done = self._file.fileno(), 0
        stop = data.nbytes - data.nbytes % STEP
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            while done < stop and done % STEP == 0:  # a limit may cut a write short: the rest then says why
                done += os.write(file, data[done:stop])
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            self._is_direct = False  # not in this file system, or not in these steps
        finally:
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return done


def _lies_in_steps(data: memoryview) -> bool:
    if data.readonly:  # small blocks that were joined
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % STEP == 0
