"""Facts about the samples of a run by split and sample id, and the text of tokens: samples.jsonl, tokens.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from hookrun.store.format import SAMPLES, TOKENS
from hookrun.store.inside import is_there
from hookrun.store.records import SampleLine, TokenLine, read_records


class SampleTable:
    """Reads the files when they are first needed; empty if the run did not write them.

    folder: the run directory
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SAMPLES
        self._tokens = folder / TOKENS

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """One line per sample in the order of the run: `split`, `sample`, `file`, `class`, `predicted_class`."""
        return read_records(self._path, SampleLine) if is_there(self._path) else []

    @cached_property
    def by_sample(self) -> Mapping[tuple[str, int], dict[str, Any]]:
        """(split, sample id) -> its line."""
        return {(line["split"], line["sample"]): line for line in self.lines}

    @cached_property
    def texts(self) -> Mapping[int, str]:
        """Token id -> its text, for the tokens of captured rows."""
        lines = read_records(self._tokens, TokenLine) if is_there(self._tokens) else []
        return {line["token"]: line["text"] for line in lines}

    def text(self, token: int) -> str:
        """The text of a token; ``""`` if the run did not write it."""
        return self.texts.get(token, "")

    def column(self, name: str, samples: list[tuple[str, int]]) -> list[str]:
        """The value of the column for each sample (split, id), as text; ``""`` where it has none."""
        return [str(self.by_sample.get(sample, {}).get(name) or "") for sample in samples]
