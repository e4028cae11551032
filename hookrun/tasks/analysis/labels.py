"""The labels of captured rows: the targets of the run's data, or a column of a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookrun.data.info import SPLITS
from hookrun.data.samples import IGNORED
from hookrun.data.source import checked_file
from hookrun.data.text_files import lines
from hookrun.errors import nearest, spec_error
from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import Run

_FILE, _COLUMN = "task.labels.file", "task.labels.column"
_NO_LABEL = ("", str(IGNORED))
_KEYS = ("split", "sample", "file", "position")
"""The columns of a file of labels that say whose label a line has."""


@dataclass(frozen=True)
class Labels:
    """The labels of the rows of a capture.

    values: [rows] int64, IGNORED where a row has none; of numeric targets floats [rows] or [rows, targets]
    names:  the name of each class; None: a class is its number
    """

    values: Tensor
    names: Sequence[str] | None = None


def labels_of_data(run: Run, capture: StoredCapture, *, answer: bool) -> Labels:
    """The target of each row: that of its sample, or for a row of one token that at its position.

    answer: of samples of tokens, the sample's last target for each of its rows. A row of a whole sequence has it too

    Raises SpecError if a sample has several labels.
    """
    values = run.labels_of(capture)
    of_tokens = run.data_info().tokenizer is not None
    if of_tokens and answer and values.dim() == 1:
        # Rows of tokens are in the order of the splits.
        ids, splits = capture.sample_ids, capture.split_numbers
        values = torch.cat([run.labels(ids[splits == part], SPLITS[part]) for part in splits.unique()])
    if of_tokens and values.dim() == 2:
        last = (values != IGNORED).long().mul(torch.arange(1, values.shape[1] + 1)).argmax(1, keepdim=True)
        values = values.gather(1, last).squeeze(1)
    if not values.is_floating_point() and values.dim() > 1:
        what = f"each sample of the data has {list(values.shape[1:])} labels, and a probe predicts one for each row"
        raise spec_error("task.labels", what, "name a file: task.labels={file: labels.csv, column: NAME}")
    return Labels(values)


def labels_of_file(name: str, column: str, capture: StoredCapture) -> Labels:
    """The label of each row from a column of a CSV file with a header; an empty cell or -100 is no label.

    A line is for the rows that agree with its columns `sample` (and `split`, `position`) or `file`. Without these
    columns line n is of sample n, if the file has as many lines as the capture has samples of its one split.

    Raises SpecError if the file cannot be read, or a row is not in it.
    """
    path, _ = checked_file(name, None, _FILE, (".csv",))
    table = csv.DictReader(text for _, text in lines(path, _FILE))
    records, header = list(table), list(table.fieldnames or ())
    if column not in header:
        raise spec_error(_COLUMN, f"{path} has no column {column!r}", nearest(column, header))
    for number, record in enumerate(records, 2):
        if None in record or None in record.values():
            what = f"{path}: record {number} does not have {len(header)} cells"
            raise spec_error(_FILE, what, "correct it")
    keys = [key for key in _KEYS if key in header and key != column]
    if not {"sample", "file"} & set(keys):
        samples = set(_row_keys(capture, ["split", "sample"]))
        in_order = {(split, str(number)) for split, _ in samples for number in range(len(records))}
        if samples != in_order or len(samples) > len(records):
            what = f"{path} has {len(records)} lines and no column `sample` or `file`, and the capture has "
            what += f"{len(samples)} samples of {' and '.join(sorted({split for split, _ in samples}))}"
            hint = "add a column `sample` (and `split`), as in samples.jsonl of the run"
            raise spec_error(_FILE, what, hint)
        keys.append("sample")
        records = [{**record, "sample": str(number)} for number, record in enumerate(records)]
    rows = _row_keys(capture, keys)
    cells_of = {tuple(record[key].strip() for key in keys): record[column].strip() for record in records}
    if len(cells_of) < len(records):
        what = f"{path} has several lines for the same {', '.join(keys)}"
        raise spec_error(_FILE, what, "leave one of them")
    missing = list(dict.fromkeys(row for row in rows if row not in cells_of))
    if missing:
        first = ", ".join(f"{key} {value}" for key, value in zip(keys, missing[0], strict=True))
        what = f"{path} has no line for {len(missing)} of {len(set(rows))}: the first is {first}"
        raise spec_error(_FILE, what, "add them; an empty cell leaves a row out")
    return _parsed([cells_of[row] for row in rows])


def _row_keys(capture: StoredCapture, keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Of each row, its split, sample, file or position as a file of labels writes it."""
    columns = {
        "split": capture.splits,
        "sample": [*map(str, capture.sample_ids.tolist())],
        "file": capture.files,
        "position": [*map(str, capture.positions.tolist())],
    }
    return list(zip(*(columns[key] for key in keys), strict=True))


def _parsed(cells: Sequence[str]) -> Labels:
    """Whole numbers are classes, other numbers are targets, and texts are names of classes in alphabetical order."""
    given = {cell for cell in cells if cell not in _NO_LABEL}
    try:
        number_of = {cell: float(cell) for cell in given}
    except ValueError:
        names = sorted(given)
        number_of = {name: number for number, name in enumerate(names)}
        return Labels(torch.tensor([number_of.get(cell, IGNORED) for cell in cells]), names)
    if all(number.is_integer() for number in number_of.values()):
        return Labels(torch.tensor([int(number_of.get(cell, IGNORED)) for cell in cells]))
    return Labels(torch.tensor([number_of.get(cell, float("nan")) for cell in cells]))
