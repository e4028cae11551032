"""The rows of scores that metrics are computed from: the right rows, with the right targets, in float32 at least."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.tasks.loop import scored
from hookrun.tasks.loop.scored import (
    ScorePart,
    class_scores,
    of_labels,
    of_tokens,
    one_sample,
    token_scores,
    without_labels,
)


def test_tokens_have_the_row_sample_target_and_position_of_their_place() -> None:
    scores = torch.arange(2 * 3 * 5.0).view(2, 3, 5)
    target = torch.tensor([[IGNORED, 4, 2], [3, IGNORED, 1]])
    chosen = torch.tensor([[False, True, True], [True, True, False]])
    found = of_tokens({"logits": scores}, target, chosen, positions=torch.tensor([[0, 1, 2], [-2, -1, 0]]))
    assert found is not None and len(found) == 4
    assert torch.equal(found.whole(), scores[chosen])
    assert (found.samples.tolist(), found.positions.tolist()) == ([0, 0, 1, 1], [1, 2, -2, -1])
    assert found.targets.tolist() == [4, 2, 3, IGNORED]
    named = found.with_answers(torch.tensor([10, 20]), torch.tensor([1, 2])).with_targets
    assert (len(named), named.positions.tolist()) == (3, [1, 2, -2])
    assert (named.answers.tolist(), named.wrong.tolist()) == ([10, 10, 20], [1, 1, 2])
    assert torch.equal(named.whole(), scores[chosen][:3])
    for other in (target[:, :2], target[:1]):
        assert of_tokens(scores, other, other > 0, other) is None, "no score for each token"
    assert of_tokens(scores[0], target, chosen, target) is None


@pytest.mark.cases("most", [1, 4, 9, 2**23])
@pytest.mark.cases("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_parts_together_are_all_rows_at_least_in_float32(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of scores is converted at once."""
    monkeypatch.setattr(scored, "MOST_NUMBERS", most)
    output, others = torch.randn(5, 4).to(dtype), torch.randn(5, 4)
    found = of_labels(output, torch.tensor([3, IGNORED, 1, 0, 2]))
    assert found is not None
    rows = found.with_targets.compared_with(others).with_answers(torch.arange(5), torch.arange(5, 10))
    parts = list(rows.parts())
    kept = torch.tensor([0, 2, 3, 4])
    assert torch.equal(torch.cat([each.scores for each in parts]), output[kept].to(parts[0].scores.dtype))
    assert parts[0].scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    together = {
        name: torch.cat([getattr(each, name) for each in parts]) for name in ("targets", "answers", "wrong")
    }
    assert {name: each.tolist() for name, each in together.items()} == {
        "targets": [3, 1, 0, 2], "answers": [0, 2, 3, 4], "wrong": [5, 7, 8, 9]
    }  # fmt: skip
    assert torch.equal(torch.cat([each.others for each in parts]), others[kept])
    assert all(len(each.targets) <= max(1, most // 4) for each in parts)
    assert list(of_labels(output[:0], torch.zeros(0, dtype=torch.int64)).parts()) == []


def test_a_part_has_the_probabilities_of_its_own_and_of_the_other_scores() -> None:
    scores, others = torch.tensor([[0.0, 0.0], [0.0, 9.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    part = ScorePart(scores, torch.tensor([1, 0]), others=others)
    assert torch.allclose(part.log_probabilities.exp().sum(1), torch.ones(2))
    assert torch.allclose(part.log_others, torch.full((2, 2), 0.5).log())
    assert part.at(scores, torch.tensor([1, 1], dtype=torch.int32)).tolist() == [0, 9]
    assert ScorePart(scores, torch.tensor([1, 0])).log_others is None


def test_scores_to_compare_with_have_the_same_shape_or_it_is_said() -> None:
    found = without_labels(torch.ones(2, 3))
    assert found is not None and found.targets.tolist() == [IGNORED, IGNORED] and len(found.with_targets) == 0
    with pytest.raises(HookrunError, match=r"'kl': the scores have shape \[2, 3\], .* with \[2, 4\]"):
        found.compared_with(torch.ones(2, 4))
    assert found.compared_with(torch.ones(1, 2, 3)).others.shape == (2, 3)


def test_only_scores_of_classes_and_labels_give_a_row_for_each_sample() -> None:
    scores, labels = torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1])
    assert not of_labels({"aux": labels, "logits": scores}, labels).scores.requires_grad
    wrong: list[tuple[Any, Any]] = [
        (scores[None], labels), (scores.long(), labels), ({}, labels), (None, labels), (scores, labels.float()),
        (scores, labels[:1]), (scores, labels[:, None]),
    ]  # fmt: skip
    assert [of_labels(*each) for each in wrong] == [None] * len(wrong)
    assert without_labels(scores[None]) is None and class_scores([]) is None


def test_scores_of_tokens_are_the_logits_and_never_another_tensor_of_the_same_shape() -> None:
    first, second = torch.ones(1, 2, 3, requires_grad=True), torch.zeros(1, 2, 3)
    for output in (first, (first, second), {"hidden": second, "logits": first}):
        found = token_scores(output)
        assert found is not None and torch.equal(found, first) and not found.requires_grad
    assert token_scores({"hidden": second}) is token_scores(()) is token_scores(object()) is None
    assert torch.equal(token_scores([None, second]), second)


def test_one_sample_is_a_batch_of_one_in_float32_and_what_belongs_to_no_sample_stays() -> None:
    hidden, shared = torch.randn(2, 3).half(), torch.ones(3)
    output = {
        "logits": hidden,
        "shared": shared,
        "ids": torch.tensor([7, 8]),
        "loss": torch.ones(()),
        "none": None,
    }
    found, target = one_sample(output, torch.tensor([5, 6]), 1)
    assert target.tolist() == [6] and found["ids"].tolist() == [8] and found["ids"].dtype == torch.int64
    assert found["logits"].dtype == torch.float32 and torch.equal(found["logits"], hidden[1:].float())
    assert found["shared"] is shared and found["loss"].dim() == 0 and found["none"] is None
