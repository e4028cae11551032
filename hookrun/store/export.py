"""Captured rows for other programs: a Parquet or Arrow file, or a folder of Parquet files, through pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hookrun.errors import HookrunError
from hookrun.store.background import ahead
from hookrun.store.captures.read import StoredCapture
from hookrun.store.captures.tensor_file import dtype_name, start_flushing
from hookrun.store.files import new_folder, os_errors, replacing
from hookrun.store.tables import installed

PARQUET = ".parquet"
ARROW = ".arrow"

_GROUP_BYTES = 2**25
_GROUP_ROWS = 2**16
"""The most bytes and rows of a row group, which is in memory at once; it has at least one row."""

_NAMES = ("hook", "module", "path")
_TEXTS = {"split": "splits", "file": "files", "class": "class_names", "text": "text"}
_NUMBERS = {
    "sample": "sample_ids",
    "epoch": "epochs",
    "step": "steps",
    "call": "calls",
    "position": "positions",
    "key": "keys",
    "token": "token_ids",
}
"""Column -> the attribute of a capture; what a row does not have is an empty text, or a number below 0."""


def export_rows(target: Path, captures: Sequence[StoredCapture]) -> None:
    """Write the rows of captures into one file, or into a folder, new or empty, with a Parquet file for each.

    A line is a row: `hook`, `module`, `path`, `split`, `file`, `class`, `text`, `sample`, `epoch`, `step`, `call`,
    `position`, `key`, `token`, and `vector`, the row's numbers as a list of fixed size. What a row does not have is a
    missing value. The metadata `hookrun` is JSON with the `dtype` and `shape` of a row: bfloat16 and 8-bit floats,
    which Arrow does not have, are written as float32, which holds each of their values.

    HookrunError if the rows are of several kinds, or Arrow does not have their dtype; StoreError if the target cannot
    be written, of which then nothing stays.
    """
    installed("pyarrow")
    if target.suffix:
        _require_one_kind(captures)
        _write(target, captures)
        return
    with os_errors(f"cannot write the folder {target}"), new_folder(target) as aside:
        for number, capture in enumerate(captures):
            _write(aside / f"{number:06d}{PARQUET}", [capture])


def _require_one_kind(captures: Sequence[StoredCapture]) -> None:
    first = captures[0]
    for capture in captures:
        if (capture.dtype, capture.shape[1:]) != (first.dtype, first.shape[1:]):
            raise HookrunError(
                f"rows of several kinds do not fit into one column: {first!r}, {capture!r}. Name a capture and a "
                "module, or a folder, which gets a file for each"
            )


def _write(target: Path, captures: Sequence[StoredCapture]) -> None:
    """Write captures with rows of one kind into a file."""
    schema = _schema(captures[0])
    with replacing(target) as file, _writing(file, target.suffix, schema) as write:
        for table in ahead(_tables(captures, schema)):
            write(table)
            start_flushing(file)


def _tables(captures: Sequence[StoredCapture], schema: Any) -> Iterator[Any]:
    """The row groups."""
    for capture in captures:
        size = max(1, min(_GROUP_ROWS, _GROUP_BYTES // capture.row_bytes))
        for start in range(0, len(capture), size):
            yield _table(capture.chosen(slice(start, start + size)), schema)


def _schema(capture: StoredCapture) -> Any:
    arrow = installed("pyarrow")
    kind = {"dtype": dtype_name(capture.dtype), "shape": capture.shape[1:]}
    if capture.dtype.is_complex or not capture.row_bytes:
        raise HookrunError(
            f"{capture.label}: Arrow has no type for a row of {kind['dtype']} {list(kind['shape'])}: "
            "export it as .safetensors"
        )
    numbers = arrow.array(capture.numpy(slice(0, 1)).reshape(-1))
    element = arrow.field("element", numbers.type, nullable=False)
    types = dict.fromkeys((*_NAMES, *_TEXTS), arrow.string()) | dict.fromkeys(_NUMBERS, arrow.int64())
    vector = arrow.field("vector", arrow.list_(element, len(numbers)), nullable=False)
    return arrow.schema([*types.items(), vector], {"hookrun": json.dumps(kind)})


@contextmanager
def _writing(file: BinaryIO, suffix: str, schema: Any) -> Iterator[Callable[[Any], None]]:
    """A function for the block that writes a table into the file, in Parquet as a row group."""
    if suffix == ARROW:
        with installed("pyarrow", "pyarrow.ipc").new_file(file, schema) as writer:
            yield writer.write_table
        return
    # Vectors hardly compress, and nobody looks for them by their smallest element.
    columns = [*_NAMES, *_TEXTS]
    options = {"compression": "none", "use_dictionary": columns, "write_statistics": [*columns, *_NUMBERS]}
    with installed("pyarrow", "pyarrow.parquet").ParquetWriter(file, schema, **options) as writer:
        yield writer.write_table


def _table(rows: StoredCapture, schema: Any) -> Any:
    """The rows as an Arrow table."""
    arrow = installed("pyarrow")
    columns: list[Any] = []
    for name in _NAMES:
        columns.append(arrow.repeat(getattr(rows, name), len(rows)))
    for attribute in _TEXTS.values():
        texts = [text or None for text in getattr(rows, attribute)]
        columns.append(arrow.array(texts, arrow.string()))
    for attribute in _NUMBERS.values():
        numbers = getattr(rows, attribute).numpy()
        columns.append(arrow.array(numbers, mask=numbers < 0))
    vectors = arrow.array(rows.numpy().reshape(-1))
    columns.append(arrow.FixedSizeListArray.from_arrays(vectors, type=schema.field("vector").type))
    return arrow.Table.from_arrays(columns, schema=schema)
