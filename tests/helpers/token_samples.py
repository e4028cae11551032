"""Samples of tokens to look at, and the error where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hookrun.data import DataInfo, Split, describe, load
from hookrun.data.samples import IGNORED, Samples
from hookrun.data.settings import Data
from hookrun.errors import SpecError


def made(name: str, split: Split = "val", **args: Any) -> tuple[DataInfo, Samples]:
    config = Data(name=name, args=args)
    return describe(config, split), load(config, split, seed=0)


def refusal(name: str, split: Split = "val", **args: Any) -> str:
    with pytest.raises(SpecError) as error:
        made(name, split, **args)
    return str(error.value)


def real(sample: Any) -> tuple[list[int], list[int]]:
    """The token ids of a sample without its padding, and the targets at them."""
    inputs, target = sample
    kept = inputs["attention_mask"].bool()
    assert (target[~kept] == IGNORED).all()
    return inputs["input_ids"][kept].tolist(), target[kept].tolist()


def prompts(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return str(path)
