"""Tokens that end a generation: given ones, those of the model's config, or the tokenizer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from hookrun.data import DataInfo, describe
from hookrun.spec.experiment import Data
from hookrun.tasks.loop.generation import stop_tokens, vocabulary_of


def model(end: Any, generation_end: Any = None, vocabulary: int | None = 50) -> nn.Module:
    made: Any = nn.Identity()
    made.config = SimpleNamespace(eos_token_id=end, vocab_size=vocabulary)
    if generation_end is not None:
        made.generation_config = SimpleNamespace(eos_token_id=generation_end)
    return cast(nn.Module, made)


@pytest.fixture(scope="module")
def info() -> DataInfo:
    return describe(Data(name="names"), "val")


def test_given_tokens_come_before_those_of_the_configs(info: DataInfo) -> None:
    both = model(3, generation_end=[4, 5])
    assert stop_tokens([7], both, info) == (7,)
    assert stop_tokens([], both, info) == (), "no token ends a sequence"
    assert stop_tokens(None, both, info) == (4, 5)
    assert stop_tokens(None, model(3), info) == (3,)


def test_a_token_outside_of_the_vocabulary_is_ignored(info: DataInfo) -> None:
    assert stop_tokens(None, model([49, 50, -1, None, "x"]), info) == (49,)
    assert stop_tokens(None, nn.Identity(), info) == ()
    assert vocabulary_of(model(1), info) == 50
    assert vocabulary_of(nn.Identity(), info) == info.vocab_size
