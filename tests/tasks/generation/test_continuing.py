"""Each prompt of a batch is continued as it would be alone, by transformers or by a loop over the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.tasks.generation.continuing import (
    GenerationKeys,
    cannot_generate,
    continue_prompts,
    generates,
    next_scores,
    padded,
    prompts_of,
    runs_together,
)
from hookrun.tasks.generation.next_token import NextTokens

CPU = torch.device("cpu")


class Positional(nn.Module):
    """A model whose next token depends on all earlier tokens except padding, and on the position."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        sums = (input_ids * attention_mask).cumsum(1)
        return nn.functional.one_hot((3 * sums + position_ids) % 11, 11).float()


class Plain(nn.Module):
    """As above, without a mask: it counts padding too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot((3 * x.cumsum(1) + torch.arange(x.shape[1])) % 11, 11).float()


def continued(model: nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    choosing = NextTokens(None, [0] * len(prompts), stop=(9,), most=4)
    continue_prompts(model, prompts, choosing, GenerationKeys(), CPU, stop=(9,), pad=0)
    return choosing.tokens


def test_prompts_of_different_lengths_continue_together_as_alone() -> None:
    prompts = [[1, 2, 3], [5], [4, 4, 1], [2, 7]]
    found = continued(Positional(), prompts)
    assert found == [continued(Positional(), [prompt])[0] for prompt in prompts]
    assert all(len(each) == 4 or each[-1] == 9 for each in found)
    assert runs_together(Positional()) and not runs_together(Plain())
    assert continued(Plain(), prompts[::2]) == [continued(Plain(), [prompt])[0] for prompt in prompts[::2]]


def test_padding_is_on_the_given_side() -> None:
    tokens, mask = padded([[1, 2, 3], [4]], 7, left=True)
    assert tokens.tolist() == [[1, 2, 3], [7, 7, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    tokens, mask = padded([[1, 2, 3], [4]], 7, left=False)
    assert tokens.tolist() == [[1, 2, 3], [4, 7, 7]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_prompt_is_its_real_tokens_and_one_without_tokens_is_named() -> None:
    inputs = {
        "input_ids": torch.tensor([[0, 5, 6], [7, 8, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 0]]),
    }
    data = SimpleNamespace(file=lambda sample: f"line {sample}")
    batch: Any = SimpleNamespace(inputs=inputs, ids=torch.tensor([3, 4]), data=data, split="val")
    assert prompts_of(batch, None) == [[5, 6], [7, 8]] and prompts_of(batch, 1) == [[5], [7]]
    inputs["attention_mask"][1] = 0
    with pytest.raises(HookrunError, match=r"sample 4 of the val split \(line 4\) has no tokens to continue"):
        prompts_of(batch, None)


def test_scores_are_those_of_the_last_token_in_at_least_float32() -> None:
    ids, scores = torch.zeros(2, 3, dtype=torch.int64), torch.randn(2, 3, 5)
    for output in (scores, {"logits": scores}, (scores, None)):
        assert torch.equal(next_scores(output, ids), scores[:, -1])
    assert next_scores(scores.bfloat16(), ids).dtype == torch.float32
    for wrong in (scores[:, :2], scores[:, 0], {"last_hidden_state": scores}):
        with pytest.raises(
            HookrunError, match=r"needs scores \[batch, length, vocabulary\] for tokens \[2, 3\]"
        ):
            next_scores(wrong, ids)
    assert not generates(Plain()) and not cannot_generate(Plain())
