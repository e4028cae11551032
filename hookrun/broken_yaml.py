"""A YAML file that cannot be read: file, line and column, the line itself, and what usually helps."""

from __future__ import annotations

from pathlib import Path

from yaml import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from hookrun.errors import Problem


def problem_of_yaml(error: YAMLError) -> Problem:
    """The problem that a YAML exception stands for."""
    if isinstance(error, ReaderError):
        what = f"{error.reason}: character {error.character!r} at position {error.position}"
        return Problem(str(error.name), what)
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return Problem("", str(error))
    mark = error.problem_mark
    line = _line(mark.name, mark.line)
    what = f"{error.problem}, in the line\n        {line.strip()}" if line else str(error.problem)
    return Problem(f"{mark.name}:{mark.line + 1}:{mark.column + 1}", what, _hint(str(error.problem), line))


def _line(file: str, number: int) -> str:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return lines[number] if number < len(lines) else ""


def _hint(problem: str, line: str) -> str:
    if "duplicate key" in problem:
        return "a mapping has each key once: rename or remove one"
    if "escape character" in problem:
        return "backslashes need single quotes: 're:layer\\.\\d+'"
    if line.startswith("\t"):
        return "indent with spaces: YAML knows no tabs"
    key, _, value = (part.strip() for part in line.partition(":"))
    if value.startswith(("*", "!", "@", "%", "&", "`")):
        return f"a value that begins with {value[0]} needs quotes: {key}: '{value}'"
    if "mapping values" in problem:
        return "a value that holds a colon and a space needs quotes"
    return "a value that begins with * ! @ % & ` or holds a colon and a space needs quotes"
