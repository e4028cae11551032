"""Rows of a capture as vectors in bounded memory; the CKA of all pairs of modules; linear probes of features."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from draws import normal
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.testing import assert_close

from hookrun.errors import HookrunError, SpecError
from hookrun.run.tasks.captured.base import SUGGESTED
from hookrun.run.tasks.captured.cka import Way, chosen_way, linear_cka_of_all
from hookrun.run.tasks.captured.features import Features, Projection, reading_bytes
from hookrun.studies.captures.probing import fit, memory_needed
from hookrun.studies.captures.task import ProbeTask


def features_of(rows: torch.Tensor, block_bytes: int = 2**26, to: int | None = None) -> Features:
    return Features("layer", rows, block_bytes, None if to is None else Projection(to, seed=3))


def probe(
    x: torch.Tensor, labels: torch.Tensor, seed: int = 0
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return fit(features_of(x), labels, torch.arange(len(labels)), seed)


@pytest.mark.parametrize("block_bytes", [1, 8 * 6 * 4, 2**20])
def test_blocks_have_the_requested_rows(block_bytes: int) -> None:
    real = normal(20, 2, 3)
    rows = torch.tensor([0, 1, 2, 7, 11, 12, 19])
    for capture in (real, torch.complex(real, -real), real.bfloat16()):
        flat = torch.view_as_real(capture).flatten(1) if capture.is_complex() else capture.flatten(1)
        features = features_of(capture, block_bytes)
        assert features.width == features.captured == flat.shape[1]
        assert torch.equal(features.whole(rows), flat[rows].double()), capture.dtype
        lengths = [len(values) for _, values in features.blocks(rows)]
        assert max(lengths) <= features.rows_at_once
        assert sum(lengths) == len(rows)


def test_rows_that_are_not_finite_are_counted() -> None:
    x = normal(6, 4)
    x[2, 1], x[4, 0] = torch.nan, torch.inf
    with pytest.raises(HookrunError, match="layer: 2 of 6 rows hold values that are not finite"):
        features_of(x, 1).centered(torch.arange(6))


def test_four_blocks_of_the_widest_module_are_needed() -> None:
    narrow = features_of(torch.empty(10, 5), 1000)
    wide = features_of(torch.empty(10, 1000), 1000)
    assert reading_bytes([narrow, wide]) == reading_bytes([wide]) == 4 * 1000 * 8, "at least one row"
    projected = features_of(torch.empty(10, 1000), 1000, to=8)
    assert reading_bytes([projected]) == reading_bytes([wide]) + 2 * 8 * 1000


def test_a_projection_is_suggested_only_where_it_would_fit() -> None:
    def refusal(*shape: int, projected: int = 0) -> str:
        settings = SimpleNamespace(seed=0)
        analysis: Any = SimpleNamespace(captures={"fc": torch.empty(shape)}, settings=settings)
        needs = {None: {"fc": 150_000_001}, SUGGESTED: {"fc": projected}}
        with pytest.raises(SpecError) as raised:
            ProbeTask(max_bytes=10**6).require_memory(analysis, "probing", needs.__getitem__)
        return str(raised.value)

    found = refusal(2000, 8, 1024, projected=10**6)
    assert "task.max_bytes=200000000" in found
    assert "fc has 2,000 rows of [8, 1024]" in found
    assert f"task.project={SUGGESTED}" in found
    assert "task.project" not in refusal(2000, 8, 1024, projected=10**6 + 1)
    assert "task.project" not in refusal(2000, SUGGESTED)


def test_cka_is_the_formula_of_the_paper() -> None:
    tensors = [normal(50, width, seed=width) for width in (3, 20, 90)]
    features = [features_of(x, 8 * 90 * 7) for x in tensors]
    whole = linear_cka_of_all(features, Way(by_features=True, tile=50, needed=0))
    for tile in (50, 16):
        assert_close(linear_cka_of_all(features, Way(by_features=False, tile=tile, needed=0)), whole)
    center = np.eye(50) - 1 / 50
    k, l = (center @ x.numpy() @ x.numpy().T @ center for x in tensors[1:])  # noqa: E741
    expected = np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l))
    assert float(whole[1, 2]) == pytest.approx(expected, rel=1e-5)
    constant = [features_of(tensors[0]), features_of(torch.ones(50, 2))]
    assert float(linear_cka_of_all(constant, chosen_way(constant, 2**31))[0, 1]) == 0


def test_the_method_depends_on_the_allowed_memory() -> None:
    narrow = [features_of(normal(1000, 4), 2**12)] * 2
    assert chosen_way(narrow, 2**30).by_features
    wide = [features_of(torch.empty(50, 10_000), 2**12)] * 2
    roomy = chosen_way(wide, 2**30)
    tight = chosen_way(wide, 2**19)
    hopeless = chosen_way(wide, 1)
    assert (roomy.by_features, roomy.tile) == (False, 50)
    assert not tight.by_features
    assert tight.tile < 50
    assert not hopeless.by_features
    assert hopeless.tile == 16
    assert hopeless.needed > 1
    assert roomy.needed > tight.needed >= hopeless.needed


@pytest.mark.parametrize("width", [300, 9], ids=["more features than samples", "fewer"])
def test_a_probe_equals_that_of_scikit_learn(width: int) -> None:
    x = normal(80, width).double() * torch.linspace(0.1, 9, width) + 3
    labels = torch.arange(80) % 3
    x[:, 7] = 0.1  # constant
    for y in (labels, torch.stack([x[:, :4].sum(1), x[:, 1]], dim=1)):
        line, weights = fit(features_of(x, 8 * width * 7), y, torch.arange(80), seed=4)
        parts = train_test_split(x.numpy(), y.numpy(), test_size=0.25, random_state=4,
                                 stratify=y.numpy() if y is labels else None)  # fmt: skip
        logistic = LogisticRegression(max_iter=9000, tol=1e-8)
        model = logistic if y is labels else RidgeCV(alphas=np.logspace(-3, 4, 8))
        theirs = make_pipeline(StandardScaler(), model).fit(parts[0], parts[2])
        assert line["score"] == ("accuracy" if y is labels else "r2")
        assert line["accuracy"] == pytest.approx(theirs.score(parts[1], parts[3]), abs=1e-3)
        weight = np.atleast_2d(theirs[1].coef_) / theirs[0].scale_
        assert_close(weights["weight"].numpy(), weight.astype(np.float32), rtol=1e-3, atol=1e-5)
        bias = theirs[1].intercept_ - weight @ theirs[0].mean_
        assert_close(weights["bias"].numpy(), bias.astype(np.float32), rtol=1e-3, atol=1e-3)


def test_weights_of_projected_features_are_for_the_captured_ones() -> None:
    x = normal(60, 30)
    labels = (x[:, 0] > 0).long()
    features = features_of(x, 2**16, to=8)
    line, found = fit(features, labels, torch.arange(60), seed=0)
    assert line["features"] == features.captured == 30
    assert found["weight"].shape == (1, 30)
    rows = features.whole(torch.arange(60))
    assert rows.shape == (60, features.width) == (60, 8)
    assert not torch.equal(Features("x", x, 1, Projection(8, seed=2)).whole(torch.arange(60)), rows)
    norms = rows.square().sum(1) / x.double().square().sum(1)
    assert 0.5 < float(norms.mean()) < 1.5, "inner products are kept in expectation"
    _, plain = probe(rows, labels)
    scores = x @ found["weight"].T + found["bias"]
    assert_close(scores, rows.float() @ plain["weight"].T + plain["bias"], rtol=1e-3, atol=1e-4)


def test_more_features_than_samples_need_memory_by_samples() -> None:
    narrow = memory_needed(features_of(torch.empty(100, 75), 1), outputs=2)
    wide = memory_needed(features_of(torch.empty(100, 10_000), 1), outputs=2)
    wider = memory_needed(features_of(torch.empty(100, 20_000), 1), outputs=2)
    assert narrow < wide < wider
    assert wide < 8 * 3 * 100 * 10_000, "the matrix of all features is not made"


def test_a_class_of_one_sample_does_not_stop_a_probe() -> None:
    labels = torch.tensor([0] * 20 + [1] * 20 + [2])
    assert 0 <= probe(normal(41, 3), labels)[0]["accuracy"] <= 1


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0] * 7 + [-100] * 23, "at least 8 samples with a label, and there are 7"),
        ([3] * 9, "needs two classes, and the rows to fit it have only 3"),
    ],
)
def test_too_few_samples_or_classes_are_an_error(labels: list[int], said: str) -> None:
    with pytest.raises(HookrunError, match=said):
        probe(normal(len(labels), 3), torch.tensor(labels))
