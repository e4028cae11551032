"""The rows of scores that metrics are computed from: the right rows, with the right targets, in float32 at least."""

from __future__ import annotations

import pytest
import torch

from hookrun.data.samples import IGNORED
from hookrun.errors import HookrunError
from hookrun.tasks.loop import rows as rows_of
from hookrun.tasks.loop.rows import RowPart, class_scores, of_samples, of_tokens, token_scores


def test_tokens_have_the_row_sample_target_and_position_of_their_place() -> None:
    scores = torch.arange(2 * 3 * 5.0).view(2, 3, 5)
    target = torch.tensor([[IGNORED, 4, 2], [3, IGNORED, 1]])
    chosen = torch.tensor([[False, True, True], [True, True, False]])
    found = of_tokens({"logits": scores}, target, chosen, positions=torch.tensor([[0, 1, 2], [-2, -1, 0]]))
    assert found is not None and len(found) == 4
    assert torch.equal(found.whole()[0], scores[chosen])
    assert (found.samples.tolist(), found.positions.tolist()) == ([0, 0, 1, 1], [1, 2, -2, -1])
    assert found.targets.tolist() == [4, 2, 3, IGNORED]
    named = found.with_answers(torch.tensor([10, 20]), torch.tensor([1, 2])).with_targets
    assert (len(named), named.positions.tolist()) == (3, [1, 2, -2])
    assert (named.answers.tolist(), named.wrong.tolist()) == ([10, 10, 20], [1, 1, 2])
    assert torch.equal(named.whole()[0], scores[chosen][:3])
    for other in (target[:, :2], target[:1]):
        assert of_tokens(scores, other, other > 0, other) is None, "no score for each token"
    assert of_tokens(scores[0], target, chosen, target) is None


@pytest.mark.cases("most", [1, 4, 9, 2**23])
@pytest.mark.cases("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_parts_together_are_all_rows_at_least_in_float32(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of scores is converted at once."""
    monkeypatch.setattr(rows_of, "MOST_NUMBERS", most)
    output, others = torch.randn(5, 4).to(dtype), torch.randn(5, 4)
    target = torch.tensor([[3, IGNORED, 1, 0, 2]])
    found = of_tokens(output[None], target, target > IGNORED, torch.arange(5)[None])
    assert found is not None
    rows = found.compared_with(others).with_answers(torch.tensor([4]), torch.tensor([7])).with_targets
    parts = list(rows.parts())
    kept = torch.tensor([0, 2, 3, 4])
    assert torch.equal(torch.cat([each.scores for each in parts]), output[kept].to(parts[0].scores.dtype))
    assert parts[0].scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    together = {
        name: torch.cat([getattr(each, name) for each in parts]) for name in ("targets", "answers", "wrong")
    }
    assert {name: each.tolist() for name, each in together.items()} == {
        "targets": [3, 1, 0, 2], "answers": [4] * 4, "wrong": [7] * 4
    }  # fmt: skip
    assert torch.equal(torch.cat([each.others for each in parts]), others[kept])
    assert all(len(each.targets) <= max(1, most // 4) for each in parts)
    assert list(of_samples(output[:0], torch.zeros(0, dtype=torch.int64)).parts()) == []


def test_a_part_has_the_probabilities_of_its_own_and_of_the_other_scores() -> None:
    scores, others = torch.tensor([[0.0, 0.0], [0.0, 9.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    part = RowPart(scores, torch.tensor([1, 0]), others=others)
    assert torch.allclose(part.log_probabilities.exp().sum(1), torch.ones(2))
    assert torch.allclose(part.log_others, torch.full((2, 2), 0.5).log())
    assert part.at(scores, torch.tensor([1, 1], dtype=torch.int32)).tolist() == [0, 9]
    assert RowPart(scores, torch.tensor([1, 0])).log_others is None


def test_scores_to_compare_with_have_the_same_shape_or_it_is_said() -> None:
    found = of_samples(torch.ones(2, 3), torch.full((2,), IGNORED))
    assert len(found) == 2 and len(found.with_targets) == 0
    with pytest.raises(HookrunError, match=r"'kl': the scores have shape \[2, 3\], .* with \[2, 4\]"):
        found.compared_with(torch.ones(2, 4))
    assert found.compared_with(torch.ones(1, 2, 3)).others.shape == (2, 3)


def test_samples_have_a_row_of_the_main_tensor_if_it_has_one_for_each() -> None:
    scores, labels = torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1])
    found = of_samples({"aux": labels, "logits": scores}, labels).scores
    assert found is not None and torch.equal(found, scores) and not found.requires_grad
    for output in (scores[None], {}, None, scores.sum()):
        assert of_samples(output, labels).scores is None
    assert class_scores([]) is class_scores(scores[None]) is class_scores(scores.long()) is None


def test_only_scores_of_classes_and_labels_are_scores_of_labels() -> None:
    scores, labels = torch.ones(2, 3), torch.tensor([0, 1])
    assert RowPart(scores, labels).of_labels and RowPart(scores, labels).of_classes
    for output, target in ((scores[..., None], labels), (scores, labels.float()), (scores, labels[:, None])):
        assert not RowPart(output, target).of_labels


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
    found, target = of_samples(output, torch.tensor([5, 6])).of_sample(1)
    assert target.tolist() == [6] and found["ids"].tolist() == [8] and found["ids"].dtype == torch.int64
    assert found["logits"].dtype == torch.float32 and torch.equal(found["logits"], hidden[1:].float())
    assert found["shared"] is shared and found["loss"].dim() == 0 and found["none"] is None
