"""Files that are complete or absent: replaced atomically, or appended to line by line, and read back."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from csv import DictWriter
from io import StringIO
from pathlib import Path
from typing import Any, BinaryIO

from hookrun.errors import HookrunError, counted
from hookrun.store.format import decode, encode
from hookrun.store.inside import open_inside, read_inside, size_inside

MOST_JSON = 32 * 2**20
"""Most bytes of a JSON file that is read."""

MOST_LINES = 2**30
"""Most bytes of a file of JSON lines that is read."""

MOST_LINE = 32 * 2**20
BYTES_AT_ONCE = 2**17
"""Bytes of lines, about, that are parsed at a time."""


class StoreError(HookrunError):
    """A file of a run could not be written or read; the message names the file and says what was kept."""


@contextmanager
def os_errors(message: str) -> Iterator[None]:
    """Raise a StoreError for an OSError of the block: the message, and the system's own."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{message}: {os_reason(error)}") from error


@contextmanager
def replacing(path: Path, *, flushes: bool = True, flushes_folder: bool = True) -> Iterator[BinaryIO]:
    """Write a file atomically: `path` is replaced only once the new content is complete and on disk.

    It is written under another name in the same folder, flushed, renamed, and the folder is flushed. An error
    before the renaming leaves `path` as it was; an OSError becomes a StoreError.

    flushes:        False for content that can be made again: after a power cut it may be empty
    flushes_folder: False if the folder is flushed later anyway
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.unlink(missing_ok=True)
        with open(aside, "xb") as file:  # mode x: an untrusted directory may hold a link of that name
            yield file
            file.flush()
            if flushes:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as error:
        with suppress(
            OSError
        ):  # the first error is the one to report; readers ignore the name of a file that stays
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            kept = "what it held before is kept" if path.is_file() else "there is no file of that name"
            raise StoreError(f"cannot write {path}: {os_reason(error)}; {kept}") from error
        raise
    if flushes_folder:
        sync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any], *, flushes_folder: bool = True) -> None:
    """Write `value` atomically as strict JSON, indented for people. See `replacing`."""
    text = encode(value, indent=2)
    with replacing(path, flushes_folder=flushes_folder) as file:
        file.write(f"{text}\n".encode("ascii"))


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file with a header atomically. See `replacing`."""
    text = StringIO()
    writer = DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def overwrite_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` over a small file: not atomically, but a full disk has room where the old content lies."""
    text = f"{encode(value, indent=2)}\n".encode("ascii")
    with os_errors(f"cannot write {path}"), open(path, "r+b", buffering=0) as file:
        file.write(text)
        file.truncate()
        os.fsync(file.fileno())


def make_folder(path: Path, *, parents: bool = True) -> None:
    """Make the folder; it may be there already.

    parents: also make the folders above; False inside a run directory, which is not made again after its removal
    """
    with os_errors(f"cannot make the folder {path}"):
        path.mkdir(parents=parents, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Flush a folder, so that a file renamed into it is still there after a power cut."""
    try:
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot flush folders
            raise StoreError(
                f"cannot flush the folder {path}: {os_reason(error)}; "
                "its files are written, but a power cut may undo that"
            ) from error


class Lines:
    """A file of one JSON object per line, opened at the first line; lines are only appended.

    Before `extend` returns, the lines have reached the operating system, and with `durable` the disk. Lines that
    cannot be written whole are removed again. If the file was removed or replaced meanwhile, a StoreError is raised.
    A forked child adds nothing.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self.count = 0
        self._owner = os.getpid()
        self._durable = durable
        self._file: int | None = None

    def extend(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add a line for each record, or none of them: StoreError if the file system refuses."""
        if not records or os.getpid() != self._owner:
            return
        lines = memoryview("".join(f"{encode(record)}\n" for record in records).encode("ascii"))
        self.require_there()
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
                if self._durable:
                    sync_folder(self.path.parent)
            file = self._file
            end = os.fstat(file).st_size
            try:
                while lines:  # a write may be partial
                    lines = lines[os.write(file, lines) :]
                if self._durable:
                    os.fsync(file)
            except BaseException:
                with suppress(OSError):  # readers skip an incomplete last line
                    os.ftruncate(file, end)
                raise
        except OSError as error:
            kept = f"{counted(self.count, 'line')} kept" if self.count else "no line was written"
            raise StoreError(f"cannot append to {self.path}: {os_reason(error)}; {kept}") from error
        self.count += len(records)

    def size(self) -> int:
        """The size of the file in bytes, which may not be on the disk yet; 0 without a line."""
        self.require_there()
        with os_errors(f"cannot read {self.path}"), suppress(FileNotFoundError):
            return os.stat(self.path, follow_symlinks=False).st_size
        return 0

    def sync(self) -> None:
        """Wait until every line so far is on the disk; another thread may add lines. StoreError if the disk refuses."""
        if self._file is not None:
            with os_errors(f"cannot flush {self.path}"):
                os.fsync(self._file)

    def require_there(self) -> None:
        """StoreError if the open file was removed or replaced: no reader would find its lines."""
        if self._file is None:
            return
        try:
            if os.path.samestat(os.fstat(self._file), os.stat(self.path)):
                return
            why = "another file has taken its name"
        except OSError as error:
            why = os_reason(error)
        raise StoreError(f"{self.path} was removed during the run, with its {self.count} lines: {why}")

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._file is not None:
            try:
                self.require_there()
            finally:
                file, self._file = self._file, None
                os.close(file)


def read_json(path: Path, root: Path | None = None) -> Any:
    """The content of a JSON file, of at most `MOST_JSON` bytes.

    root: the run directory, below which no link is followed; the file's own folder unless given

    StoreError if it cannot be read or is not JSON.
    """
    with os_errors(f"cannot read {path}"):
        data = read_inside(path, root, limit=MOST_JSON)
    try:
        return decode(data)
    except ValueError as error:
        raise StoreError(f"{path} is not JSON that hookrun reads: {error}") from error


def read_lines(
    path: Path, root: Path | None = None, notes: list[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """The number from 1 and the record of each line of a file that `Lines` wrote.

    A process that is killed while it appends leaves a last line that is cut off, which is left out. A broken line
    before the last one is a StoreError. A file that does not exist has no records.

    root:  the run directory, below which no link is followed; the file's own folder unless given
    notes: gets a note on a last line that is cut off
    """
    try:
        size = size_inside(path, root)
        if size > MOST_LINES:
            message = f"it has {size:,} bytes, more than the {MOST_LINES:,} that are read"
            raise StoreError(f"cannot read {path}: {message}")
        for number, (line, record) in enumerate(decoded_lines(path, root), start=1):
            if not line:
                message = f"longer than the {MOST_LINE:,} bytes that are read"
                raise StoreError(f"{path}, line {number}: {message}")
            if not isinstance(record, ValueError):
                yield number, record
            elif line.endswith(b"\n"):
                raise StoreError(f"{path}, line {number}: not JSON: {record}")
            elif notes is not None:
                notes.append(
                    f"{path}: the last line is cut off and left out; {number - 1} before it are whole"
                )
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot read {path}: {os_reason(error)}") from error


def decoded_lines(
    path: Path, root: Path | None = None, *, most: int = MOST_LINE
) -> Iterator[tuple[bytes, Any]]:
    """Each line of a file, and its value, or the ValueError that says why it is not JSON.

    A line of more than `most` bytes is given as ``b""``. Raises OSError as `open_inside` does.
    """
    with open_inside(path, root) as file:
        for lines in _lines_together(file, most):
            yield from zip(lines, _values(lines), strict=True)


def _lines_together(file: BinaryIO, most: int) -> Iterator[list[bytes]]:
    """The lines of a file, some at a time; of a line that is longer than `most` bytes none is kept in memory."""
    lines, size, is_rest = list[bytes](), 0, False
    while piece := file.readline(most):
        is_end = piece.endswith(b"\n") or len(piece) < most
        if not is_rest:
            lines.append(piece if is_end else b"")
            size += len(piece)
        is_rest = not is_end
        if size >= BYTES_AT_ONCE:
            yield lines
            lines, size = [], 0
    yield lines


def _values(lines: Sequence[bytes]) -> list[Any]:
    with suppress(ValueError):  # parsing many lines in one go takes a third of the time
        values: list[Any] = decode(b"[" + b",".join(lines) + b"]")
        if len(values) == len(lines):
            return values
    values = []
    for line in lines:
        try:
            values.append(decode(line))
        except ValueError as error:
            values.append(ValueError(str(error)))  # without the line and the frames that the error keeps
    return values


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which would examine all objects many times while many are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def os_reason(error: OSError) -> str:
    """The message of the operating system, without error number and path."""
    return error.strerror or str(error)
