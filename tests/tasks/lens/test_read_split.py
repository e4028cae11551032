"""Means over the positions of a pass, whichever parts a batch has, and a line for each sample, part and position."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from hookrun.actions.base import TokenRows
from hookrun.data.samples import IGNORED
from hookrun.store.run_dir import RunDir
from hookrun.tasks.lens.read_split import PartMeans, write_lines
from hookrun.tasks.lens.reading import PartRead, ScoredPositions

HERE = torch.zeros(4, dtype=torch.int64), torch.arange(4)
ASKED = ScoredPositions(HERE, torch.tensor([5, IGNORED, 6, 7]), torch.tensor([8, IGNORED, IGNORED, 9]))


A, A_HEAD, B = ("a", 0, None), ("a", 0, 1), ("b", 0, None)


def part(name: str = "a", *, head: int | None = None, kl: bool = True, factor: float = 1.0) -> PartRead:
    """A part at four positions, at the first of which the most probable token is the answer."""
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0]) * factor
    right = torch.tensor([True, True, False, False])
    top = torch.arange(8).reshape(4, 2)
    read = PartRead((name, 0, head), top, top / 10, numbers, numbers / 2, right)
    read.kl = numbers / 10 if kl else None
    return read


def test_means_leave_out_positions_without_an_answer_or_a_wrong_one() -> None:
    means = PartMeans()
    means.add(A, part(), ASKED)
    means.add(None, part(factor=10, kl=False), ASKED)
    counts = [means.sums[A][name] for name in ("positions", "answers", "pairs")]
    assert counts == [4, 3, 2]
    expected = {"kl": 0.25, "accuracy": 1 / 3, "answer_logit": 8 / 3, "logit_difference": 1.25}
    assert means.means(A, compared=True) == pytest.approx(expected)
    assert means.means(A, compared=False).keys() == {"answer_logit", "logit_difference"}
    assert means.means(None, compared=False)["answer_logit"] == pytest.approx(80 / 3)


def test_a_part_that_is_missing_in_a_batch_counts_as_nothing_there() -> None:
    means = PartMeans()
    for keys in ((None, A), (None, A, A_HEAD, B)):
        for key in keys:
            means.add(key, part(), ASKED)
    for name in ("kl", "accuracy", "answer_logit", "logit_difference"):
        assert means.means(A, compared=True)[name] == 2 * means.means(B, compared=True)[name], name
    lines = list(means.lines("heads"))
    assert [(line["module"], line.get("head"), line["positions"]) for line in lines] == [
        ("a", None, 8), ("a", 1, 4), ("b", None, 4)
    ]  # fmt: skip


def test_saved_sums_go_on_to_the_same_numbers() -> None:
    straight, first, again = PartMeans(), PartMeans(), PartMeans()
    again.load_state_dict(first.state_dict())
    assert again.sums == {}
    for means in (straight, first):
        means.add(A, part(factor=0.1), ASKED)
        means.add(None, part(), ASKED)
    again.load_state_dict(first.state_dict())
    for means in (straight, again):
        means.add(B, part(factor=0.3), ASKED)
        means.add(A, part(factor=0.7), ASKED)
    assert again.sums == straight.sums
    assert first.sums[A]["positions"] == 4, "the saved object is not written to"


class Lines:
    def __init__(self) -> None:
        self.lines = list[dict[str, Any]]()

    def append(self, stream: str, lines: list[dict[str, Any]]) -> None:
        self.lines += lines


def test_lines_are_by_sample_then_part_then_position_and_leave_out_what_is_not_known() -> None:
    run = Lines()
    samples, numbers = torch.tensor([0, 0, 1, 1]), torch.tensor([40, 40, 30, 30])
    rows = TokenRows(samples, numbers, torch.tensor([0, 2, 0, 1]), torch.tensor([11, 12, 13, -1]))
    parts = [part("a"), part("b", head=1, kl=False)]
    write_lines(
        cast(RunDir, run),
        "val",
        "heads",
        rows,
        ASKED,
        parts,
        lambda token: f"<{token}>" if token >= 0 else None,
    )
    order = [(line["sample"], line["part"], line["position"]) for line in run.lines]
    assert order == [
        *((40, name, place) for name in "ab" for place in (0, 2)),
        *((30, name, place) for name in "ab" for place in (0, 1)),
    ]
    first, second = run.lines[:2]
    assert first == {
        "sample": 40, "split": "val", "part": "a", "kind": "heads", "layer": 0, "position": 0, "token": 11,
        "text": "<11>", "top": [[0, "<0>", 0.0], [1, "<1>", pytest.approx(0.1)]], "answer_logit": 1.0,
        "wrong_logit": 0.5, "logit_difference": 0.5, "kl_to_output": pytest.approx(0.1),
    }  # fmt: skip
    assert "answer_logit" not in second and "wrong_logit" not in second
    assert "answer_logit" in run.lines[4] and "wrong_logit" not in run.lines[4]
    assert run.lines[2]["head"] == 1 and "kl_to_output" not in run.lines[2] and "head" not in first
    assert run.lines[5]["text"] is None
