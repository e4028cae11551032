"""Continuations: each next token, prompts as they continue alone, records, sums and the lines of the terminal."""

from __future__ import annotations

import math
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from hookrun.data import DataInfo, describe
from hookrun.data.settings import Data
from hookrun.errors import HookrunError
from hookrun.run.experiment.task_keys import Sampling
from hookrun.studies.generate.continuing import (
    Continuation,
    NextTokens,
    cannot_generate,
    generates,
    next_scores,
    prompts_of,
    restricted,
)
from hookrun.studies.generate.generation import Sums, Texts, record_of, show, stop_tokens, vocabulary_of


def scores(*tokens: int) -> Tensor:
    """[B, 4], where each token is the most probable of its row."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 4).float()


def test_a_prescribed_first_token_is_taken_whatever_the_scores() -> None:
    choosing = NextTokens(Sampling(), [0, 1], stop=(), most=2, begins=2)
    assert choosing.choose(scores(1, 3) * 50).tolist() == [2, 2]
    assert choosing.choose(scores(1, 3) * 50).tolist() == [1, 3]


def test_open_sequences_need_a_finite_score() -> None:
    choosing = NextTokens(None, [0, 0], stop=(3,), most=3)
    choosing.choose(scores(1, 3))
    wrong = scores(1, 1)
    wrong[1] = torch.nan
    assert choosing.choose(wrong).tolist() == [1, 0]
    for value in (torch.nan, torch.inf, -torch.inf):
        wrong[0] = value
        with pytest.raises(
            HookrunError, match="sequence 0 of the batch has no finite score for its new token 2"
        ):
            choosing.choose(wrong)


def test_each_new_token_is_another_draw() -> None:
    choosing = NextTokens(Sampling(), range(5), stop=(), most=4)
    for _ in range(4):
        choosing.choose(torch.zeros(5, 30))
    for tokens in choosing.tokens:
        assert len(set(tokens)) > 1


def test_draws_follow_the_distribution() -> None:
    ordered = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    places = torch.tensor([2, 0, 4, 3, 1])
    logits = ordered[places].repeat(3000, 1)
    for sampling, of_ordered in (
        (Sampling(), ordered.softmax(-1)),
        (Sampling(temperature=0.5), (2 * ordered).softmax(-1)),
        (Sampling(top_k=2), torch.tensor([2.0, 1.0, *[-torch.inf] * 3]).softmax(-1)),
        (Sampling(top_p=0.7), torch.tensor([2.0, 1.0, *[-torch.inf] * 3]).softmax(-1)),  # 0.64 + 0.24
        (Sampling(top_p=0.1), torch.tensor([1.0, 0, 0, 0, 0])),
        (Sampling(top_k=9, top_p=1.0), ordered.softmax(-1)),
    ):
        expected = of_ordered[places]
        assert torch.allclose(restricted(logits[:1], sampling)[0].softmax(-1), expected), sampling
        choosing = NextTokens(sampling, range(3000), stop=(), most=1)
        counts = torch.bincount(choosing.choose(logits), minlength=5) / 3000
        assert torch.allclose(counts, expected, atol=0.035), sampling
        assert not counts[expected == 0].any(), sampling


def test_a_prompt_without_tokens_is_named() -> None:
    inputs = {
        "input_ids": torch.tensor([[0, 5, 6], [7, 8, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 0]]),
    }
    data = SimpleNamespace(file=lambda sample: f"line {sample}")
    batch: Any = SimpleNamespace(inputs=inputs, ids=torch.tensor([3, 4]), data=data, split="val")
    assert prompts_of(batch, None) == [[5, 6], [7, 8]]
    assert prompts_of(batch, 1) == [[5], [7]]
    inputs["attention_mask"][1] = 0
    with pytest.raises(HookrunError, match=r"sample 4 of the val split \(line 4\) has no tokens to continue"):
        prompts_of(batch, None)


def test_scores_are_those_of_the_last_token_in_at_least_float32() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    scores = torch.randn(2, 3, 5)
    for output in (scores, {"logits": scores}, (scores, None)):
        assert torch.equal(next_scores(output, ids), scores[:, -1])
    assert next_scores(scores.bfloat16(), ids).dtype == torch.float32
    for wrong in (scores[:, :2], scores[:, 0], {"last_hidden_state": scores}):
        with pytest.raises(
            HookrunError, match=r"needs scores \[batch, length, vocabulary\] for tokens \[2, 3\]"
        ):
            next_scores(wrong, ids)
    assert not generates(nn.Identity())
    assert not cannot_generate(nn.Identity())


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


def test_a_record_has_the_reason_of_its_end() -> None:
    now = Continuation([0], True, torch.tensor([5.0, 0, 0]))
    without = Continuation([1, 2], False, torch.zeros(3))
    found = record_of([8, 9], now, Texts(None), without)
    assert found["prompt_ids"] == [8, 9]
    assert found["ids"] == [0]
    assert found["reason"] == "end"
    assert found["text"] is None
    assert found["ids_without"] == [1, 2]
    assert found["reason_without"] == "length"
    p = torch.full((3,), 1 / 3).double()
    q = torch.tensor([5.0, 0, 0]).double().softmax(0)
    assert found["kl_first"] == pytest.approx(float((p * (p / q).log()).sum()))
    assert found["next"][0][0] == 0
    assert not {"ids_without", "kl_first"} & record_of([7], now, Texts(None)).keys()


def test_the_samples_that_changed_most_are_kept() -> None:
    sums = Sums()
    for number in range(20):
        sums.add(record(number, kl=number % 7))
    assert [each["kl_first"] for each in sums.top] == [6, 6, 5, 5, 5, 4, 4, 4]


def shown(sums: Sums, width: int, *, compared: bool = True) -> list[str]:
    console = Console(width=width, file=StringIO(), markup=False, highlight=False)
    show(sums, console, compared=compared)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_lines_fit_the_terminal() -> None:
    first = Sums()
    later = Sums()
    nothing = Sums()
    first.add(record(3, kl=math.log(2)))
    later.add(record(4, without="b"))
    nothing.add(record(5))
    (_, line) = shown(first, 100)
    assert "val 3  0.693  #2 25.0% → 'a' 50.0%" in line
    assert line.endswith("'one two 3'")
    assert "      without: 'b'" in shown(later, 60)
    assert "      with:    'a'" in shown(later, 60)
    assert "the hooks changed neither" in shown(nothing, 100)[0]
    assert shown(nothing, 100, compared=False) == ["  val 5: 'one two 5'", "      →  'a'"]
    for sums in (first, later, nothing):
        for each in shown(sums, 30):
            assert len(each) <= 30
