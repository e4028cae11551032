"""Sums modulo a number."""

from __future__ import annotations
import json
from pathlib import Path
from typing import Any
import pytest
import torch
from hookrun.data import DataInfo, Split, describe, load
from hookrun.data.samples import IGNORED, Samples
from hookrun.data.text_files import MOST_LINE
from hookrun.errors import SpecError
from hookrun.spec.experiment import Data
from token_samples import made, prompts, real, refusal


def test_modular_addition_has_every_pair_once_with_its_sum() -> None:
    seen = []
    for split in ("train", "val"):
        _, samples = made("modular_addition", split, modulus=7)  # type: ignore[arg-type]
        for number in range(len(samples)):
            (a, plus, b, equals), targets = real(samples[number])
            assert (plus, equals) == (7, 8) and targets == [IGNORED] * 3 + [(a + b) % 7]
            seen.append((a, b))
    assert sorted(seen) == [(a, b) for a in range(7) for b in range(7)]
