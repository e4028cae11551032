"""Reads YAML files: each is checked as text first, and errors name file, line and column."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import KeyValidationError, OmegaConfBaseException
from yaml.reader import ReaderError

from hookrun.config.yaml_limits import MAX_BYTES, OutOfBounds, check_text
from hookrun.errors import HookrunError, Problem, SpecError


def load(path: Path) -> Any:
    """The content of a YAML file as a DictConfig or a ListConfig, interpolations unresolved. Raises SpecError."""
    with reading(path) as text:
        return OmegaConf.load(StringIO(text))


@contextmanager
def reading(path: Path) -> Iterator[str]:
    """The text of a YAML file that keeps the limits of `hookrun.config.yaml_limits`.

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
        raise OutOfBounds(
            f"is larger than {MAX_BYTES >> 20} MiB",
            "keep tensors in a file of their own: {file: x.safetensors}",
        )
    return content.decode("utf-8")


def _problem(error: Exception, path: Path, text: str) -> Problem:
    match error:
        case OutOfBounds():
            where = str(path) if error.line is None else f"{path}:{error.line}"
            return Problem(where, error.what, error.hint)
        case yaml.YAMLError():
            return _broken(error, path, text)
        case FileNotFoundError():
            return Problem(str(path), "there is no such file")
        case OSError():
            return Problem(str(path), error.strerror or str(error))
        case UnicodeDecodeError():
            what = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
            return Problem(str(path), what)
        case OmegaConfBaseException(full_key=str(key)) if key:
            is_of_key = isinstance(error, KeyValidationError) or "key type" in str(error)
            hint = (
                "a key is a text: quote what YAML reads as something else, such as null" if is_of_key else ""
            )
            return Problem(f"{path}: {key}", str(error.msg or error).splitlines()[0], hint)
        case RecursionError():
            return Problem(str(path), "its values are nested too deeply")
    return Problem(str(path), str(error))


def _broken(error: yaml.YAMLError, path: Path, text: str) -> Problem:
    """File, line and column, the line itself, and what usually helps."""
    if isinstance(error, ReaderError):
        return Problem(
            str(path), f"{error.reason}: character {error.character!r} at position {error.position}"
        )
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(str(path), str(error))
    mark = error.problem_mark
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    what = f"{error.problem}, in the line\n        {line.strip()}" if line else str(error.problem)
    return Problem(f"{path}:{mark.line + 1}:{mark.column + 1}", what, _hint(str(error.problem), line))


def _hint(problem: str, line: str) -> str:
    if "duplicate key" in problem:
        return "a mapping has each key once: rename or remove one"
    if "escape character" in problem:
        return "backslashes need single quotes: 're:layer\\.\\d+'"
    if line.startswith("\t"):
        return "indent with spaces: YAML does not allow tabs"
    key, _, value = (part.strip() for part in line.partition(":"))
    if value.startswith(("*", "!", "@", "%", "&", "`")):
        return f"a value that begins with {value[0]} needs quotes: {key}: '{value}'"
    if "mapping values" in problem:
        return "a value that holds a colon and a space needs quotes"
    if "expected ',' or" in problem:
        return (
            "close every { and [, put commas between the items, and quote a value that holds one of { } [ ] ,"
        )
    if "expected <block end>, but found '<block " in problem:
        return "begin the keys of one mapping, and the items of one list, in the same column"
    return "a value that begins with * ! @ % & ` or holds a colon and a space needs quotes"
