"""YAML files: refuses those whose aliases multiply, and says where broken YAML is broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from omegaconf.errors import OmegaConfBaseException
from yaml.reader import ReaderError

from hookrun.errors import HookrunError, Problem, SpecError

MAX_VALUES = 100_000
"""More than any experiment holds. OmegaConf copies what an alias stands for, and copies of copies multiply."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise SpecError, with the path, for whatever goes wrong while the file is read."""
    try:
        refuse_bomb(path.read_text(encoding="utf-8"))
        yield
    except HookrunError:
        raise
    except Exception as error:
        raise SpecError([_problem(error, path)]) from error


def _problem(error: Exception, path: Path) -> Problem:
    match error:
        case yaml.YAMLError():
            return _broken(error, path)
        case FileNotFoundError():
            return Problem(str(path), "there is no such file")
        case OSError():
            return Problem(str(path), error.strerror or str(error))
        case UnicodeDecodeError():
            what = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
            return Problem(str(path), what)
        case OmegaConfBaseException(full_key=str(key)) if key:
            return Problem(f"{path}: {key}", str(error.msg or error).splitlines()[0])
    return Problem(str(path), str(error))


def _broken(error: yaml.YAMLError, path: Path) -> Problem:
    """File, line and column, the line itself, and what usually helps."""
    if isinstance(error, ReaderError):
        return Problem(
            str(path), f"{error.reason}: character {error.character!r} at position {error.position}"
        )
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(str(path), str(error))
    mark = error.problem_mark
    lines = path.read_text(encoding="utf-8").splitlines()
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
    return "a value that begins with * ! @ % & ` or holds a colon and a space needs quotes"


def refuse_bomb(text: str) -> None:
    """Raise ValueError for YAML whose aliases stand for far more values than are written."""
    if "&" in text and "*" in text:
        try:
            root = yaml.compose(text, yaml.SafeLoader)
        except yaml.YAMLError:
            return  # whoever reads the file next says where it is broken
        if root is not None and _size(root, {}) > MAX_VALUES:
            raise ValueError(
                f"its aliases stand for more than {MAX_VALUES:,} values: write out what is needed"
            )


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node holds when each alias is written out; infinite for one that contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # for an alias of this node that is found inside it
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [value for _, value in node.value]
        known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]
