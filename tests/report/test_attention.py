"""Attention patterns and token strips on the page of a run: the right tokens, the right numbers, of limited size."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from report_pages import cells, part_of, read_lines, write_lines
from torch.nn import functional

from hookrun.report import write_report
from hookrun.report.token_pictures import MOST_CELLS, Token, head_picture, is_causal, strips, strongest
from hookrun.store.reader import Run


def test_the_tokens_of_a_sample_are_read_without_its_padding(predicted: Run) -> None:
    lines = read_lines(predicted.path / "samples.jsonl")
    assert [line["sample"] for line in lines] == list(range(6))
    assert len({len(line["tokens"]) for line in lines}) > 1
    for line in lines:
        half = (len(line["tokens"]) - 1) // 2
        assert line["tokens"][1 : half + 1] == line["tokens"][half + 1 :]
        assert line["padding"] == [11 - len(line["tokens"]), 0]
        assert line["targets"] == [None] * (half + 1) + line["tokens"][half + 2 :] + [None]


def test_the_axes_of_a_pattern_are_the_tokens(predicted: Run) -> None:
    part = part_of(predicted, "patterns")
    tokens = read_lines(predicted.path / "samples.jsonl")[0]["tokens"]
    names = ["start" if token == 0 else str(token) for token in tokens]
    pictures = re.findall(r'<svg class="chart attention".*?</svg>', part, re.S)
    assert len(pictures) == 3 * 4, "three samples, four heads"
    assert re.findall(r"<text[^>]*>(.*?)</text>", pictures[0]) == [*names, *names]
    assert f"4 heads, {len(names)} tokens" in part
    start = 11 - len(tokens)
    pattern = predicted.captures["patterns"]["blocks.1.attn.pattern"][0][:, start:, start:]
    rows = cells(part)[:4]
    for head, row in enumerate(rows):
        place = int(pattern[head, 1:].argmax())
        query = 1 + place // len(tokens)
        key = place % len(tokens)
        value = float(pattern[head, query, key])
        assert row[5] == f"“{names[query]}” at {query} to “{names[key]}” at {key}: {round(value, 3):.4g}"
        before = [float(pattern[head, at, at - 1]) for at in range(1, len(tokens))]
        assert float(row[2]) == pytest.approx(sum(before) / len(before), abs=6e-4)
        half = (len(tokens) - 1) // 2
        copied = [float(pattern[head, at, at - half + 1]) for at in range(half + 1, len(tokens))]
        assert float(row[4]) == pytest.approx(sum(copied) / len(copied), abs=6e-4)


def test_a_pattern_is_recognised_by_its_shape(predicted: Run) -> None:
    assert "attention, val sample 0" in part_of(predicted, "switched"), "a head that is off stays one"
    assert '<svg class="chart attention' not in part_of(predicted, "scores")
    heads = [row[0] for row in cells(part_of(predicted, "one"))]
    assert [head for head in heads if head.isdigit()] == ["3"] * 3, "the others are of the figures' numbers"
    last = part_of(predicted, "last")
    assert last.count('<svg class="chart attention') == 3, "all heads of one query are one picture"
    length = len(read_lines(predicted.path / "samples.jsonl")[0]["tokens"])
    assert f"” at {length - 1}</span>" in last


def test_the_page_of_a_strangers_directory_is_bounded(predicted, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hookrun.report.facts.MOST_TOKENS", 30_000)
    path = Path(shutil.copytree(predicted.path, tmp_path / "run"))
    evil = "</svg><script>alert(1)</script>\u202e\x00\n" + "x" * 2000
    lines = read_lines(path / "samples.jsonl")
    tokens = [{"token": number, "text": evil if number < 12 else "t"} for number in range(500)]
    write_lines(path / "tokens.jsonl", tokens)
    lines[1] |= {"padding": [2**52, 2**52]}
    lines[2] |= {"targets": [2**50] * len(lines[2]["tokens"])}
    lines[3] |= {"tokens": [2**53] * 5000}
    lines[4] |= {"tokens": "many"}
    lines[5] |= {"padding": [1]}
    write_lines(path / "samples.jsonl", lines)
    write_report(path)
    page = (path / "report.html").read_text()
    assert len(page) < 2e6
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert "attention, val sample 0" in page
    assert "tokens.jsonl has 500 lines: " in page
    assert "&lt;/svg&gt;&lt;script&gt;" in page


CAUSAL = np.array([[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.1, 0.4]], dtype=np.float32)


def test_a_pattern_is_causal_if_no_query_attends_to_a_later_key() -> None:
    assert is_causal(CAUSAL)
    assert not is_causal(CAUSAL.T.copy())
    assert not is_causal(CAUSAL[:2])
    assert not is_causal(CAUSAL[:1, :1])


def test_the_largest_weight_ignores_the_first_query() -> None:
    queries = [0, 1, 2]
    assert strongest(CAUSAL, queries, "abc") == "“b” at 1 to “b” at 1: 0.75"
    assert strongest(CAUSAL[:1], queries[:1], "abc") == "“a” at 0 to “a” at 0: 1"
    gaps = np.full((1, 3), np.nan, dtype=np.float32)
    gaps[0, 2] = 0.5
    assert strongest(gaps, queries[1:2], "abc").endswith("“c” at 2: 0.5")


def test_names_in_a_pattern_are_escaped() -> None:
    names = ["<b>", "\u202e", "x" * 40]
    figure = head_picture("head 0", CAUSAL, rows=names, columns=names, says='says "it"')
    texts = re.findall(r"<text[^>]*>(.*?)</text>", figure.picture)
    assert texts == ["&lt;b&gt;", r"\u202e", "x" * 9 + "…"] * 2
    assert 'aria-label="head 0: says &#34;it&#34;"' in figure.picture
    assert figure.note == ""
    large = np.zeros((2 * MOST_CELLS, 2 * MOST_CELLS), dtype=np.float32)
    figure = head_picture("t", large, rows=["r"] * 128, columns=["c"] * 128, says="")
    assert figure.note == "each pixel is the largest of 2 × 2 tokens"


# ---- token strips


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
    line = read_lines(predicted.path / "samples.jsonl")[0]
    part = part_of(predicted, "predictions")
    found = [row for row in cells(part) if row[0] == "val sample 0"]
    losses = found[: len(line["tokens"])]
    chances = found[len(line["tokens"]) :]
    for row, chance, target, score in zip(
        losses, chances, line["targets"], scores[line["padding"][0] :], strict=True
    ):
        if target is None:
            assert row[4] == "–"
            assert chance[4] == "–"
            assert row[3] == "–"
            continue
        loss = functional.cross_entropy(score, torch.tensor(target)).item()
        assert float(row[4]) == pytest.approx(loss, rel=1e-3)
        assert float(chance[4]) == pytest.approx(2.718281828**-loss, rel=1e-3)
        assert row[3] == str(target)


def test_equal_values_have_equal_colours_everywhere() -> None:
    samples = {
        "val sample 0": [Token("a", 0, 1.0, ("x",)), Token("<b>", 1, None, ("y",))],
        "val sample 1": [Token("c", 3, 0.0, ("x",)), Token("d", 4, 1.0, ("y",))],
    }
    figure = strips("t", samples, what="loss", note="n", ends=("low", "high"), heads=("target",))
    styles = re.findall(
        r"<span (?:class=\"on-\w+\" style=\"([^\"]*)\" )?title=\"([^\"]*)\">(.*?)</span>", figure.picture
    )
    assert [text for _, _, text in styles] == ["a", "&lt;b&gt;", "c", "d"]
    assert styles[0][0] == styles[3][0] != styles[2][0]
    assert styles[1][0] == ""
    assert styles[1][1] == "1 · y · –"
    assert figure.table is not None
    assert figure.table.heads == ("sample", "position", "token", "target", "loss")
    assert figure.table.rows[2] == ("val sample 1", "3", "c", "x", "0")
