"""Many sequences of token ids, read from a file, in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from hookrun.errors import Problem, SpecError

MOST_TOKENS = 2**28
LONGEST = 4096
"""The largest length to which sequences are padded if no length is given."""


class ReadSequences:
    """Sequences of token ids that are appended one by one, each with the number of the line that it comes from."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._ids = array("i")
        self._starts = array("q", [0])
        self._lines = array("i")
        self.longest = 0

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return len(self._ids)

    def append(self, ids: Sequence[int], line: int) -> None:
        """Append a sequence. Raises SpecError where there are too many tokens."""
        if len(self._ids) + len(ids) > MOST_TOKENS:
            what = f"the file has more than {MOST_TOKENS:,} tokens"
            raise SpecError([Problem(self._where, what, "give a part of it")])
        self._ids.extend(ids)
        self._starts.append(len(self._ids))
        self._lines.append(line)
        self.longest = max(self.longest, len(ids))

    def line(self, number: int) -> int:
        """The line of a sequence."""
        return self._lines[number]

    def __getitem__(self, number: int) -> Tensor:
        """The ids of a sequence, [n] int64."""
        return self.span(self._starts[number], self._starts[number + 1])

    def span(self, start: int, stop: int) -> Tensor:
        """The ids from one place to another in all sequences laid end to end, [n] int64."""
        return torch.tensor(self._ids[start:stop], dtype=torch.int64)

    def line_at(self, place: int) -> int:
        """The line of the sequence that holds a place in all of them laid end to end."""
        from bisect import bisect_right

        return self._lines[bisect_right(self._starts, place) - 1]

    def length(self, asked: int | None, key: str) -> int:
        """The length of samples: as given, or that of the longest. Raises SpecError if the longest is too long."""
        if asked is not None:
            return asked
        if self.longest > LONGEST:
            what = f"the longest has {self.longest:,} tokens, and the others would be padded to that"
            raise SpecError([Problem(key, what, f"set {key}: the most tokens of a sample")])
        return max(self.longest, 1)
