"""Records of a run directory, read from their files, checked by their models and returned as plain mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hookrun.store.files import StoreError, blocks_of_lines, read_json
from hookrun.store.records import Record, checked, first_problem


def read_record(path: Path, model: type[Record]) -> dict[str, Any]:
    """The content of a JSON file directly in a run directory. StoreError if it does not fit the model."""
    content: dict[str, Any] = read_json(path)
    try:
        checked(content, model)
    except ValueError as error:
        raise StoreError(f"{path}: {error}") from error
    return content


def read_records(path: Path, line: TypeAdapter[Any]) -> list[dict[str, Any]]:
    """The lines of a file directly in a run directory, without an incomplete last line.

    StoreError if a line does not fit `line`.
    """
    found = list[dict[str, Any]]()
    for block in blocks_of_lines(path):
        for number, record in enumerate(block.records, start=block.first):
            try:
                line.validate_python(record)
            except ValidationError as error:
                raise StoreError(f"{path}, line {number}: {first_problem(error)}") from error
            found.append(record)
    return found
