"""Continuations: the tokens that end them, their records, the sums over samples and the lines of the terminal."""

from __future__ import annotations

import math
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import nn

from hookrun.data import DataInfo, describe
from hookrun.spec.experiment import Data
from hookrun.tasks.generation.generation import (
    SHOWN,
    Sums,
    Texts,
    record_of,
    show,
    stop_tokens,
    vocabulary_of,
)
from hookrun.tasks.generation.next_token import Continuation


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


def record(sample: int, kl: float = 0.0, without: str = "a") -> dict[str, Any]:
    return {
        "split": "val", "sample": sample, "prompt": f"one two {sample}", "text": "a", "ids": [1],
        "text_without": without, "ids_without": [1 if without == "a" else 2], "kl_first": kl,
        "next": [[1, "a", 0.5]], "next_without": [[2, None, 0.25]],
    }  # fmt: skip


def test_a_record_has_the_reason_of_its_end_and_the_kl_to_the_one_without_hooks() -> None:
    now = Continuation([0], True, torch.tensor([5.0, 0, 0]))
    without = Continuation([1, 2], False, torch.zeros(3))
    found = record_of([8, 9], now, Texts(None), without)
    assert (found["prompt_ids"], found["ids"], found["reason"], found["text"]) == ([8, 9], [0], "end", None)
    assert (found["ids_without"], found["reason_without"]) == ([1, 2], "length")
    p, q = torch.full((3,), 1 / 3).double(), torch.tensor([5.0, 0, 0]).double().softmax(0)
    assert found["kl_first"] == pytest.approx(float((p * (p / q).log()).sum()))
    assert found["next"][0][0] == 0
    assert not {"ids_without", "kl_first"} & record_of([7], now, Texts(None)).keys()


def test_sums_continue_from_a_saved_state_and_keep_the_largest_changes() -> None:
    whole, first, again = Sums(), Sums(), Sums()
    records = [record(number, kl=number % 7, without="ab"[number % 2]) for number in range(20)]
    for each in records:
        whole.add(each)
    for each in records[:9]:
        first.add(each)
    again.load_state_dict(first.state_dict())
    for each in records[9:]:
        again.add(each)
    assert again == whole and len(whole.top) == SHOWN
    assert [each["kl"] for each in whole.top] == [6, 6, 5, 5, 5, 4, 4, 4]
    mean = sum(each["kl_first"] for each in records) / 20
    assert whole.read(compared=True) == {"samples": 20, "new_tokens": 20, "changed": 0.5, "kl_first": mean}
    assert whole.read(compared=False) == {"samples": 20, "new_tokens": 20}


def shown(sums: Sums, width: int, *, compared: bool = True) -> list[str]:
    console = Console(width=width, file=StringIO(), markup=False, highlight=False)
    show(sums, console, compared=compared)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_lines_fit_the_terminal_and_show_the_changes() -> None:
    first, later, nothing = Sums(), Sums(), Sums()
    first.add(record(3, kl=math.log(2)))
    later.add(record(4, without="b"))
    nothing.add(record(5))
    (_, line) = shown(first, 100)
    assert "val 3  0.693  #2 25.0% → 'a' 50.0%" in line and line.endswith("'one two 3'")
    assert "      without: 'b'" in shown(later, 60) and "      with:    'a'" in shown(later, 60)
    assert "the hooks changed neither" in shown(nothing, 100)[0]
    assert shown(nothing, 100, compared=False) == ["  val 5: 'one two 5'", "      →  'a'"]
    for sums in (first, later, nothing):
        assert all(len(each) <= 30 for each in shown(sums, 30))
