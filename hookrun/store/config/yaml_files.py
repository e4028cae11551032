"""Reads YAML files: each is checked as text first, and errors name file, line and column.

The check reads the text event by event, so that nothing is built from a file that is refused.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import KeyValidationError, OmegaConfBaseException
from yaml.reader import ReaderError

from hookrun.engine.keys import MAX_DEPTH, MAX_NAME, MAX_TEXT
from hookrun.errors import HookrunError, Problem, SpecError

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
"""The largest number of keys and values with aliases expanded, since OmegaConf copies what an alias refers to."""
MAX_DIGITS = 64
INTERPOLATION_COST = 10
"""How many values an interpolation counts, since OmegaConf parses interpolations slowly."""
MAX_INTERPOLATED = 2_000
"""Characters of a text with interpolations."""
MAX_NESTED = 8
"""Interpolations inside one another, in one text."""

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML was built with it."""
_RULES = get_yaml_loader()
_LOADER: Any = _RULES if FAST_LOADER is yaml.SafeLoader else type("Loader", (FAST_LOADER, _RULES), {})
"""OmegaConf's rules for scalars and keys, over libyaml's events."""
_OWN_FILE = "keep tensors in a file of their own: {file: x.safetensors}"
_NUMBER = re.compile(r"[-+]?\.?[0-9]")
_BASE_60 = re.compile(r"[-+]?([1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)")
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class OutOfBounds(ValueError):
    """A file exceeds the limits, or has a value that YAML would read as a different one.

    line: of the file, from 1; None for the file as a whole
    """

    def __init__(self, what: str, hint: str = "", line: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.line = line


def load(path: Path) -> Any:
    """The content of a YAML file as a DictConfig or a ListConfig, interpolations unresolved. Raises SpecError."""
    with reading(path) as text:
        return parsed(text)


def load_plain(path: Path) -> Any:
    """The same as lists and mappings."""
    with reading(path) as text:
        return plain(text)


def parsed(text: str) -> Any:
    """A text of YAML as OmegaConf reads it, interpolations unresolved: DictConfig or ListConfig.

    libyaml parses it if PyYAML was built with it, sixteen times as fast; what it refuses is left to OmegaConf's parser,
    whose errors are raised.
    """
    content = _of_libyaml(text)
    return OmegaConf.load(StringIO(text)) if content is None else OmegaConf.create(content)


def plain(text: str) -> Any:
    """The same as lists and mappings. Data that JSON has too, without interpolations, needs no OmegaConf: a third of
    the time.
    """
    content: Any = _of_libyaml(text)
    if content is None or not _is_plain(content):
        content = OmegaConf.to_container(parsed(text), resolve=False)
    return content


def _of_libyaml(text: str) -> dict[Any, Any] | list[Any] | None:
    """The list or mapping in the text; None for another value, and for a text that libyaml refuses."""
    with suppress(yaml.YAMLError):
        content = _LOADER(text).get_single_data()
        if isinstance(content, dict | list):
            return content
    return None


def _is_plain(value: Any) -> bool:
    """Whether OmegaConf gives the same data back, and has nothing to check in it."""
    if isinstance(value, dict):
        return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return "${" not in value if type(value) is str else value is None or type(value) in (bool, int, float)


@contextmanager
def reading(path: Path) -> Iterator[str]:
    """The text of a YAML file that keeps the limits of this module.

    Raises SpecError, with the path, for a file that does not keep them, and for whatever goes wrong inside the block.
    """
    text = ""
    try:
        text = _text(path)
        check_text(text)
        yield text
    except HookrunError:
        raise
    except Exception as error:
        raise SpecError([_problem(error, path, text)]) from error


def _text(path: Path) -> str:
    """The text of a regular file of at most MAX_BYTES; a pipe or a device is refused unread."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its writer
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OutOfBounds("is a pipe or a device, not a file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OutOfBounds(f"is larger than {MAX_BYTES >> 20} MiB", _OWN_FILE)
    return content.decode("utf-8")


def _problem(error: Exception, path: Path, text: str) -> Problem:
    match error:
        case OutOfBounds():
            where = str(path)
            if error.line is not None:
                where += f":{error.line}"
            return Problem(where, error.what, error.hint)
        case yaml.YAMLError():
            return _broken(error, path, text)
        case FileNotFoundError():
            from hookrun.store.files import near

            return Problem(str(path), f"there is no such file{near(path, '*.y*ml')}")
        case OSError():
            return Problem(str(path), error.strerror or str(error))
        case UnicodeDecodeError():
            byte = error.object[error.start]
            return Problem(str(path), f"is not UTF-8 text: byte {byte:#04x} at position {error.start}")
        case OmegaConfBaseException(full_key=str(key)) if key:
            hint = ""
            if isinstance(error, KeyValidationError) or "key type" in str(error):
                hint = "a key is a text: quote what YAML reads as something else, such as null"
            return Problem(f"{path}: {key}", str(error.msg or error).splitlines()[0], hint, place=key)
        case RecursionError():
            return Problem(str(path), "its values are nested too deeply")
    return Problem(str(path), str(error))


def _broken(error: yaml.YAMLError, path: Path, text: str) -> Problem:
    """File, line and column, the line itself, and what usually helps."""
    if isinstance(error, ReaderError):
        what = f"{error.reason}: character {error.character!r} at position {error.position}"
        return Problem(str(path), what)
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(str(path), str(error))
    mark = error.problem_mark
    line = ""
    lines = text.splitlines()
    if mark.line < len(lines):
        line = lines[mark.line]
    what = str(error.problem)
    if line:
        what += f", in the line\n        {line.strip()}"
    return Problem(f"{path}:{mark.line + 1}:{mark.column + 1}", what, _hint(str(error.problem), line))


def _hint(problem: str, line: str) -> str:
    if line.startswith("\t"):
        return "indent with spaces: YAML does not allow tabs"
    key, _, value = (part.strip() for part in line.partition(":"))
    if value.startswith(("*", "!", "@", "%", "&", "`")) and "duplicate key" not in problem:
        return f"a value that begins with {value[0]} needs quotes: {key}: '{value}'"
    for text, hint in _HINTS.items():
        if text in problem:
            return hint
    return "a value that begins with * ! @ % & ` or holds a colon and a space needs quotes"


_HINTS = {
    "duplicate key": "a mapping has each key once: rename or remove one",
    "escape character": "backslashes need single quotes: 're:layer\\.\\d+'",
    "mapping values": "a value that holds a colon and a space needs quotes",
    "expected ',' or": (
        "close every { and [, put commas between the items, and quote a value that holds one of { } [ ] ,"
    ),
    "expected <block end>, but found '<block ": (
        "begin the keys of one mapping, and the items of one list, in the same column"
    ),
}
"""What libyaml says -> what usually helps."""


# ---- limits --------------------------------------------------------------------------------------------------------


def check_text(text: str) -> None:
    """Raise OutOfBounds for YAML beyond the limits; errors of YAML that cannot be parsed are left to its reader.

    Uses libyaml if PyYAML was built with it. What libyaml refuses is read again by the parser that OmegaConf uses,
    since the two differ in details.
    """
    for loader in (FAST_LOADER, yaml.SafeLoader):
        with suppress(yaml.YAMLError):  # reading the file later reports where it is broken
            return _check_events(text, loader)


@dataclass(slots=True)
class _Collection:
    """A mapping or a list that is being read.

    before:   values of the file before it
    height:   of what is in it so far
    children: keys and values in it so far
    """

    anchor: str | None
    is_mapping: bool
    before: int
    height: int = 1
    children: int = 0


def _check_events(text: str, loader: type) -> None:
    """Count values and depth, with aliases written out, in one pass over the events of a text."""
    parents: list[_Collection] = []
    anchors: dict[str | None, tuple[int, int] | None] = {}  # values and height; None: it is being read
    total = 0
    for event in yaml.parse(text, Loader=loader):
        line = 1 if event.start_mark is None else event.start_mark.line + 1
        match event:
            case yaml.CollectionStartEvent():
                anchors[event.anchor] = None
                parents.append(_Collection(event.anchor, isinstance(event, yaml.MappingStartEvent), total))
                total += 1
                height = 0
            case yaml.CollectionEndEvent():
                done = parents.pop()
                height = done.height
                anchors[done.anchor] = (total - done.before, height)
            case yaml.AliasEvent():
                size = anchors.get(event.anchor, (1, 0))
                if size is None:
                    raise OutOfBounds(f"*{event.anchor} stands for a value that contains itself", line=line)
                values, height = size
                total += values
            case yaml.ScalarEvent():
                is_name = bool(parents) and parents[-1].is_mapping and parents[-1].children % 2 == 0
                values = _checked_scalar(event, is_name, line)
                anchors[event.anchor] = (values, 0)
                total += values
                height = 0
            case _:
                continue
        if total > MAX_VALUES:
            raise OutOfBounds(
                f"holds more than {MAX_VALUES:,} values, aliases written out and each interpolation counted as "
                f"{INTERPOLATION_COST}",
                _OWN_FILE,
                line,
            )
        if len(parents) + height > MAX_DEPTH:
            raise OutOfBounds(f"nests its values more than {MAX_DEPTH} deep", line=line)
        if parents and not isinstance(event, yaml.CollectionStartEvent):
            parents[-1].height = max(parents[-1].height, height + 1)
            parents[-1].children += 1


def _checked_scalar(event: yaml.ScalarEvent, is_name: bool, line: int) -> int:
    """How many values the text counts. Raises OutOfBounds."""
    text: str = event.value
    most = MAX_NAME if is_name else MAX_TEXT
    if len(text) > most:
        noun = "name" if is_name else "text"
        raise OutOfBounds(f"found a {noun} of {len(text):,} characters, expected at most {most:,}", line=line)
    if event.tag in _NUMBER_TAGS or (event.tag is None and event.implicit[0] and _NUMBER.match(text)):
        if _BASE_60.fullmatch(text):
            what = f"found {text[:MAX_DIGITS]}, which YAML 1.1 reads as a number in base 60"
            raise OutOfBounds(what, f"quote it: '{text[:MAX_DIGITS]}'", line)
        if len(text) > MAX_DIGITS and re.fullmatch(r"[-+.\w]+", text):
            what = f"found a number of {len(text):,} characters, expected at most {MAX_DIGITS}"
            raise OutOfBounds(what, "quote it if it is a text", line)
    if "${" not in text:
        return 1
    if len(text) > MAX_INTERPOLATED:
        size = f"{len(text):,} characters, expected at most {MAX_INTERPOLATED:,}"
        raise OutOfBounds(f"found a text with interpolations of {size}", line=line)
    depth = 0
    for brace in re.findall(r"\$\{|\}", text):
        if brace == "}":
            depth = max(0, depth - 1)
        else:
            depth += 1
        if depth > MAX_NESTED:
            raise OutOfBounds(f"found more than {MAX_NESTED} interpolations in one another", line=line)
    return 1 + INTERPOLATION_COST * text.count("${")
