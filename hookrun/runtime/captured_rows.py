"""What a capture under `tokens` kept in memory: a tensor for each firing, and which token each of its rows is of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.rows import TokenRows

Decode = Callable[[int], str]
"""A token -> its text."""


class CapturedRows(list[Any]):
    """A list with an entry for each firing; what it says of rows is of all entries, one after the other."""

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
        """What the rows of the last entry are of."""
        self._rows.append(rows)

    @property
    def sample_ids(self) -> Tensor:
        """[rows] int64: the sample of each row; counted from 0 in the order of the calls without `hooks.samples`."""
        return _joined([each.numbers for each in self._rows])

    @property
    def positions(self) -> Tensor:
        """[rows] int64: counted from the first real token; of the query where attention patterns were captured."""
        return _joined([each.positions for each in self._rows])

    @property
    def keys(self) -> Tensor:
        """[rows] int64: the position of the key where `tokens` names queries and keys; else -1."""
        return _joined(
            [torch.full_like(each.samples, -1) if each.keys is None else each.keys for each in self._rows]
        )

    @property
    def token_ids(self) -> Tensor:
        """[rows] int64: the token at the position; -1 where it is not known."""
        return _joined([each.token_ids for each in self._rows])

    @property
    def text(self) -> list[str]:
        """The text of each row's token; ``""`` where the model's tokenizer is not known."""
        decode = self._find_decoder()
        return ["" if decode is None or each < 0 else decode(each) for each in self.token_ids.tolist()]


def _restored(values: list[Any], rows: list[TokenRows], texts: dict[int, str]) -> CapturedRows:
    """A copy, which has the texts of its tokens alone."""
    return CapturedRows(values, rows, lambda: texts.__getitem__)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
