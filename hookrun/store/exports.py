"""The records of a run in other forms: pandas, Arrow, one safetensors file, a dataset for training."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.lookup import Lookup
from hookrun.store.captures import Leaf, StoredCapture, captured_tensors
from hookrun.store.files import replacing
from hookrun.store.tensor_file import NoDigest, write_tensors

ROWS_AT_ONCE = 4096


def as_table(rows: Sequence[Mapping[str, Any]], form: Literal["pandas", "arrow"] = "pandas") -> Any:
    """A pandas DataFrame or an Arrow table with a row for each line; keys that a line lacks are missing values.

    Raises HookrunError if the library is not installed.
    """
    module = {"pandas": "pandas", "arrow": "pyarrow"}[form]
    if importlib.util.find_spec(module) is None:
        raise HookrunError(f"{module} is not installed: pip install {module}")
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = {key: [row.get(key) for row in rows] for key in keys}
    if form == "pandas":
        import pandas

        return pandas.DataFrame(columns)
    import pyarrow

    return pyarrow.table(columns)


def merge(captures: Lookup[Lookup[Leaf]], path: Path) -> list[str]:
    """Write every capture of a run into one safetensors file, and return its keys.

    A capture is called ``hook/module`` (``hook/module/path`` within a container), its sample ids
    ``hook/module.sample_ids``. Raises HookrunError if the rows of a capture differ in shape.
    """
    if path.suffix != ".safetensors":
        raise HookrunError(
            f"captures are exported as .safetensors, not {path.name}; run.table() is for metrics"
        )
    tensors = dict[str, Sequence[Tensor]]()
    for capture in captured_tensors(captures):
        name = "/".join([capture.hook, capture.module, *filter(None, [capture.path])])
        tensors[name] = _Batches(capture)
        tensors[f"{name}.sample_ids"] = [capture.sample_ids]
    if not tensors:
        raise HookrunError("the run captured nothing: there is nothing to export")
    with replacing(path) as file:
        write_tensors(file, tensors, digest=NoDigest())
    return list(tensors)


class _Batches(Sequence[Tensor]):
    """The rows of a capture as chunks that are read when needed: they need not all fit into memory."""

    def __init__(self, capture: StoredCapture) -> None:
        self._capture = capture

    def __len__(self) -> int:
        return -(-len(self._capture) // ROWS_AT_ONCE)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)  # ends an iteration
        return self._capture[number * ROWS_AT_ONCE : (number + 1) * ROWS_AT_ONCE]


class Labelled(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The rows of a capture with the labels of their samples, for training a probe.

    An item is (row, label); rows are read from disk when needed.
    """

    def __init__(self, capture: StoredCapture, labels: Tensor) -> None:
        self.capture = capture
        self.labels = labels

    def __len__(self) -> int:
        return len(self.capture)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"no row {number}, there are {len(self)}")
        return self.capture[number], self.labels[number]
