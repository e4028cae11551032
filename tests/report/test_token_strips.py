"""Token strips: each token has its number."""

from __future__ import annotations

import json
import re

import pytest
import torch
from report_pages import cells, part_of
from torch.nn import functional

from hookrun.report.token_strips import Token, strips
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


def test_equal_values_have_equal_colours_in_every_sequence_and_none_is_not_coloured() -> None:
    samples = {
        "val sample 0": [Token("a", 0, 1.0, ("x",)), Token("<b>", 1, None, ("y",))],
        "val sample 1": [Token("c", 3, 0.0, ("x",)), Token("d", 4, 1.0, ("y",))],
    }
    figure = strips("t", samples, what="loss", note="n", ends=("low", "high"), heads=("target",))
    styles = re.findall(
        r"<span (?:class=\"on-\w+\" style=\"([^\"]*)\" )?title=\"([^\"]*)\">(.*?)</span>", figure.picture
    )
    assert [text for _, _, text in styles] == ["a", "&lt;b&gt;", "c", "d"]
    assert styles[0][0] == styles[3][0] != styles[2][0] and styles[1][0] == ""
    assert styles[1][1] == "1 · y · –"
    assert figure.table is not None
    assert figure.table.heads == ("sample", "position", "token", "target", "loss")
    assert figure.table.rows[2] == ("val sample 1", "3", "c", "x", "0")
