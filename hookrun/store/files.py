"""Files that are complete or absent: replaced atomically, or appended to line by line, and read back.

A run directory may come from anybody: only its regular files are opened, and links inside it are not followed. A link
could lead to any file of the reader, reading a pipe might wait forever, a device has no end, and a sparse file is read
as gigabytes of zeros.
"""

from __future__ import annotations

import csv
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, BinaryIO

from hookrun.errors import HookrunError, counted, nearest, shortened
from hookrun.store.format import decode, encode

MOST_JSON = 32 * 2**20
"""Most bytes of a JSON file that is read."""

MOST_LINES = 2**30
"""Most bytes of a file of JSON lines that is read."""

MOST_LINE = 32 * 2**20

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


class StoreError(HookrunError):
    """A file of a run could not be written or read; the message names the file and says what was kept."""


class MissingFile(StoreError):
    """There is no such file."""


@contextmanager
def os_errors(message: str) -> Iterator[None]:
    """Raise a StoreError for an OSError of the block: the message, and the system's own."""
    try:
        yield
    except OSError as error:
        kind = MissingFile if isinstance(error, FileNotFoundError) else StoreError
        raise kind(f"{message}: {os_reason(error)}") from error


def is_file(path: Path) -> bool:
    """Whether there is one. StoreError for a name that the system does not take, such as one of 300 characters."""
    with os_errors(f"cannot read {shortened(str(path), 400)}"):
        return path.is_file()


def near(path: Path, pattern: str) -> str:
    """Names like that of a path that is missing, of what matches beside it: ``; did you mean 'b'?``; empty without any.

    pattern: of names, or of files in folders, which stand for these
    """
    if os.path.lexists(path):
        return ""
    names = {each.relative_to(path.parent).parts[0] for each in path.parent.glob(pattern)}
    return f"; {nearest(path.name, names)}" if names else ""


@contextmanager
def new_file(path: Path, *, flushes: bool = True) -> Iterator[BinaryIO]:
    """A file that does not exist yet; when the block ends it is on the disk, unless `flushes` is False."""
    with open(path, "xb") as file:  # mode x: an untrusted directory may hold a link of that name
        yield file
        file.flush()
        if flushes:
            os.fsync(file.fileno())


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
        with new_file(aside, flushes=flushes) as file:
            yield file
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


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Write a folder atomically: the block fills another one beside it, which then gets the name of `path`.

    An error leaves what was there; an empty folder is replaced.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)  # of a process of this number that was killed
    try:
        aside.mkdir()
        yield aside
        os.rename(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any], *, flushes_folder: bool = True) -> None:
    """Write `value` atomically as strict JSON, indented for people. See `replacing`."""
    text = encode(value, indent=2)
    with replacing(path, flushes_folder=flushes_folder) as file:
        file.write(f"{text}\n".encode("ascii"))


_FORMULA = re.compile(r"[\t\r\n]|\s*([=@\uff1d\uff20\uff0b\uff0d]|[-+](?!([\d.]+(e[-+]?\d+)?|inf|nan)\Z))")
"""The beginning of a formula, also behind spaces and of full width: a number with a sign is not one."""


def write_table(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file atomically. See `replacing`. rows: the cells of each line, first those of the header.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    text = StringIO()
    writer = csv.writer(text)  # its line ends, \r\n, make it quote a text with either of them
    for row in rows:
        writer.writerow([f"'{cell}" if _FORMULA.match(str(cell)) else cell for cell in row])
    with replacing(path) as file:
        file.write(text.getvalue().replace("\r\n", "\n").encode())


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


@dataclass(eq=False)
class Lines:
    """A file of one JSON object per line, opened at the first line; lines are only appended.

    Before `extend` returns, the lines have reached the operating system, and with `durable` the disk. Lines that
    cannot be written whole are removed again. If the file was removed or replaced meanwhile, a StoreError is raised.
    A forked child adds nothing.
    """

    path: Path
    durable: bool = field(default=False, kw_only=True)
    count: int = field(default=0, init=False)
    _owner: int = field(default_factory=os.getpid, init=False)
    _file: int | None = field(default=None, init=False)

    def extend(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add a line for each record, or none of them: StoreError if the file system refuses."""
        if not records or os.getpid() != self._owner:
            return
        lines = memoryview("".join(f"{encode(record)}\n" for record in records).encode("ascii"))
        self.require_there()
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
                if self.durable:
                    sync_folder(self.path.parent)
            file = self._file
            end = os.fstat(file).st_size
            try:
                while lines:  # a write may be partial
                    lines = lines[os.write(file, lines) :]
                if self.durable:
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


@contextmanager
def open_inside(path: Path, root: Path | None = None, *, limit: int | None = None) -> Iterator[BinaryIO]:
    """A regular file, opened to read its bytes in the block.

    root:  the run directory, which the caller chose; no part of `path` below it may be a link. By default the file's
           own folder.
    limit: the most bytes that it may have

    MissingFile if it does not exist, StoreError if it is not a regular file, too large, or cannot be read.
    """
    *folders, last = (path.name,) if root is None else path.relative_to(root).parts
    root = path.parent if root is None else root
    with os_errors(f"cannot read {path}"), ExitStack() as opened:
        if ".." in (*folders, last):
            raise OSError(errno.EINVAL, "the path leads out of the run directory")
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, folder)
        for name in folders:
            _require_kind(os.stat(name, dir_fd=folder, follow_symlinks=False), stat.S_IFDIR)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            opened.callback(os.close, folder)
        _require_kind(os.stat(last, dir_fd=folder, follow_symlinks=False), stat.S_IFREG)
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        file = opened.enter_context(os.fdopen(descriptor, "rb", buffering=2**16))
        info = os.fstat(descriptor)
        _require_kind(info, stat.S_IFREG)  # it may have been replaced meanwhile
        if info.st_size > MOST_HOLES and info.st_blocks * 512 < info.st_size // 64:
            on_disk = f"of which only {info.st_blocks * 512:,} are on the disk"
            raise OSError(errno.EINVAL, f"it has {info.st_size:,} bytes, {on_disk}")
        if limit is not None and info.st_size > limit:
            raise OSError(
                errno.EFBIG, f"it has {info.st_size:,} bytes, more than the {limit:,} that are read"
            )
        yield file


def _require_kind(info: os.stat_result, kind: int) -> None:
    if kind == stat.S_IFDIR and stat.S_ISREG(info.st_mode):
        raise OSError(errno.ENOTDIR, "a folder of that path is a file")
    if stat.S_IFMT(info.st_mode) != kind:
        raise OSError(errno.EINVAL, f"it is {kind_of(info)}")


def kind_of(info: os.stat_result) -> str:
    """``a link …``, ``a pipe``; ``""`` for a regular file."""
    return "" if stat.S_ISREG(info.st_mode) else _KINDS.get(stat.S_IFMT(info.st_mode), "not a file")


def listed_inside(root: Path, folder: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Path from `root`, and its `stat`, for every entry below a folder of `root` that is not a folder.

    Links are listed but not followed. A missing folder gives nothing; StoreError if a folder cannot be read, or an
    entry is removed meanwhile.
    """
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        entries = list[os.DirEntry[str]]()
        with os_errors(f"cannot list {root / here}"):
            with suppress(FileNotFoundError):  # of the folder; one that vanishes later is an error
                entries = sorted(os.scandir(root / here), key=lambda entry: entry.name)
            for entry in entries:
                path = f"{here}/{entry.name}" if here else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                else:
                    yield path, entry.stat(follow_symlinks=False)


def names_inside(folder: Path, pattern: re.Pattern[str], *, folders: bool = False) -> list[str]:
    """The names of the files and links in a folder that match, by length and alphabet: numbers without leading zeros
    are in their order. None if there is no such folder; StoreError if it cannot be read.

    folders: those of folders instead
    """
    names = list[str]()
    with os_errors(f"cannot list {folder}"), suppress(FileNotFoundError, NotADirectoryError):
        names = [each.name for each in os.scandir(folder) if each.is_dir(follow_symlinks=False) == folders]
    return sorted(filter(pattern.fullmatch, names), key=lambda name: (len(name), name))


def by_number(name: str) -> list[tuple[int, str]]:
    """A sort key for the paths of runs: numbers by size, after other names."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split("/")]


def require_size(path: Path, root: Path, size: int, *, says: str) -> None:
    """StoreError unless it is a regular file of this many bytes.

    says: where they are from, such as `its index`
    """
    with open_inside(path, root) as file:
        require_bytes(file, path, size, says=says)


def require_bytes(file: BinaryIO, path: Path, size: int, *, says: str) -> None:
    """The same of a file that is open."""
    there = os.fstat(file.fileno()).st_size
    if there != size:
        raise StoreError(f"{path} has {there:,} bytes, {says} says {size:,}: it was changed or cut off")


def read_inside(path: Path, root: Path | None = None, *, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; raises as `open_inside` does."""
    with open_inside(path, root, limit=limit) as file:
        size = os.fstat(file.fileno()).st_size
        return file.read(min(size, limit))  # Python makes room for as many bytes as it is asked for


def read_json(path: Path, root: Path | None = None) -> Any:
    """The content of a JSON file, of at most `MOST_JSON` bytes.

    root: the run directory, below which no link is followed; the file's own folder unless given

    StoreError if it cannot be read or is not JSON.
    """
    try:
        return decode(read_inside(path, root, limit=MOST_JSON))
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
    with suppress(MissingFile):
        for number, (line, record) in enumerate(decoded_lines(path, root, limit=MOST_LINES), start=1):
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


def read_whole(path: Path, root: Path, notes: list[str]) -> None:
    """Read each line of a file as `read_lines` does, for the notes and the errors alone."""
    for _ in read_lines(path, root, notes):
        pass


def decoded_lines(
    path: Path, root: Path | None = None, *, most: int = MOST_LINE, limit: int | None = None
) -> Iterator[tuple[bytes, Any]]:
    """Each line of a file, and its value, or the ValueError that says why it is not JSON.

    A line of more than `most` bytes is given as ``b""``, and not kept in memory. Raises as `open_inside` does.
    """
    with open_inside(path, root, limit=limit) as file:
        while line := file.readline(most):
            piece = line
            while len(piece) == most and not piece.endswith(b"\n"):
                piece, line = file.readline(most), b""
            try:
                value = decode(line)
            except ValueError as error:
                value = error
            yield line, value


def os_reason(error: OSError) -> str:
    """The message of the operating system, without error number and path."""
    return error.strerror or str(error)
