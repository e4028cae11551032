"""The captures of a hook with `tokens`, in memory: a tensor for each firing, and the token of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.rows import TokenRows

Decode = Callable[[int], str]
"""Token id -> its text."""


class CapturedRows(list[Any]):
    """A list with an entry for each firing; its properties describe the rows of all entries, concatenated."""

    def __init__(
        self,
        values: Iterable[Any] = (),
        rows: Iterable[TokenRows] = (),
        find_decoder: Callable[[], Decode | None] = lambda: None,
    ) -> None:
        super().__init__(values)
        self._rows = list(rows)
        self._find_decoder = find_decoder

    def __reduce__(self) -> tuple[Any, ...]:
        texts = dict(zip(self.token_ids.tolist(), self.text, strict=True))
        return _restored, (list(self), self._rows, texts)

    def note(self, rows: TokenRows) -> None:
        """Add the samples and tokens of the rows of the entry that was appended last."""
        self._rows.append(rows)

    @property
    def sample_ids(self) -> Tensor:
        """[rows] int64: the sample number of each row; without `hooks.samples` counted from 0 in the order of calls."""
        return _joined([each.numbers for each in self._rows])

    @property
    def positions(self) -> Tensor:
        """[rows] int64: the position, counted from the first real token; for attention patterns that of the query."""
        return _joined([each.positions for each in self._rows])

    @property
    def keys(self) -> Tensor:
        """[rows] int64: the position of the key if `tokens` selects queries and keys; else -1."""
        return _joined(
            [torch.full_like(each.samples, -1) if each.keys is None else each.keys for each in self._rows]
        )

    @property
    def token_ids(self) -> Tensor:
        """[rows] int64: the token id at the position; -1 if it is not known."""
        return _joined([each.token_ids for each in self._rows])

    @property
    def text(self) -> list[str]:
        """The text of each row's token; ``""`` if the model's tokenizer is not known."""
        decode = self._find_decoder()
        return ["" if decode is None or each < 0 else decode(each) for each in self.token_ids.tolist()]


def _restored(values: list[Any], rows: list[TokenRows], texts: dict[int, str]) -> CapturedRows:
    """The unpickled list; it has the texts of its own tokens instead of a tokenizer."""
    return CapturedRows(values, rows, lambda: texts.__getitem__)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
