"""Token strips: each token has its number."""

from __future__ import annotations

import json

import pytest
import torch
from report_pages import cells, part_of
from torch.nn import functional

from hookrun.store.reader import Run


def test_strips_have_a_value_for_each_token(predicted: Run) -> None:
    for hook, what in (("norms", "norm"), ("neuron", "value")):
        rows = predicted.captures[hook]["blocks.1.resid_post"]
        there = rows.where(sample=0)
        found = [row for row in cells(part_of(predicted, hook)) if row[0] == "val sample 0"]
        values = rows[there].reshape(len(there), -1)
        expected = values[:, 0] if what == "value" else values.norm(dim=1)
        assert [float(row[3]) for row in found] == pytest.approx(expected.tolist(), rel=1e-3)
        texts = rows.text
        assert [row[2] for row in found] == [texts[int(place)] for place in there]


def test_the_loss_at_each_token_is_that_of_its_target(predicted: Run) -> None:
    scores = predicted.predictions[0]
    line = json.loads((predicted.path / "samples.jsonl").read_text().splitlines()[0])
    part = part_of(predicted, "predictions")
    found = [row for row in cells(part) if row[0] == "val sample 0"]
    losses, chances = found[: len(line["tokens"])], found[len(line["tokens"]) :]
    for row, chance, target, score in zip(
        losses, chances, line["targets"], scores[line["padding"][0] :], strict=True
    ):
        if target is None:
            assert (row[4], chance[4], row[3]) == ("–", "–", "–")
            continue
        loss = functional.cross_entropy(score, torch.tensor(target)).item()
        assert float(row[4]) == pytest.approx(loss, rel=1e-3)
        assert float(chance[4]) == pytest.approx(2.718281828**-loss, rel=1e-3)
        assert row[3] == str(target)
