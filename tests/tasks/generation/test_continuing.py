"""Each prompt of a batch is continued as it would be alone, by transformers or by a loop over the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.tasks.generation.continuing import (
    ContinuationOptions,
    LoopContinuer,
    PromptGroup,
    cannot_generate,
    continuer_of,
    groups,
    next_scores,
    prompts_of,
)
from hookrun.tasks.generation.next_token import NextTokens

CPU = torch.device("cpu")
OPTIONS = ContinuationOptions(most=4, stop=(9,), pad=0, cache=True)


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
    continuer = continuer_of(model, OPTIONS)
    parts, found = list(groups(prompts, together=continuer.together)), []
    for part in parts:
        choosing = NextTokens(None, [0] * len(part.ids), stop=OPTIONS.stop, most=OPTIONS.most)
        continuer.run(part, choosing, CPU)
        found.append(choosing)
    return NextTokens.joined(found, [part.places for part in parts]).tokens


@pytest.mark.parametrize("model", [Positional(), Plain()], ids=["together", "by length"])
def test_prompts_of_different_lengths_continue_as_alone(model: nn.Module) -> None:
    prompts = [[1, 2, 3], [5], [4, 4, 1], [2, 7]]
    found = continued(model, prompts)
    assert found == [continued(model, [prompt])[0] for prompt in prompts]
    assert all(len(each) == OPTIONS.most or each[-1] == 9 for each in found)
    assert continuer_of(model, OPTIONS).together == isinstance(model, Positional)


def test_padding_is_on_the_given_side() -> None:
    group = PromptGroup((0, 1), ([1, 2, 3], [4]))
    tokens, mask = group.padded("left", 7, CPU)
    assert tokens.tolist() == [[1, 2, 3], [7, 7, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    tokens, mask = group.padded("right", 7, CPU)
    assert tokens.tolist() == [[1, 2, 3], [4, 7, 7]] and mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    by_length = groups([[1], [2, 3], [4]], together=False)
    assert [each.places for each in by_length] == [(0, 2), (1,)]


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
    assert isinstance(continuer_of(Plain(), OPTIONS), LoopContinuer) and not cannot_generate(Plain())
