"""task=probe and task=similarity: what the activations of a run tell, without running a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.testing import assert_close

import hookrun
from hookrun.cli import main
from hookrun.store.reader import Run
from hookrun.store.run_dir import RunDir
from hookrun.tasks.loop.cka import Way, linear_cka_of_all
from hookrun.tasks.loop.features import Features
from hookrun.tasks.loop.linear_probe import fit
from hookrun.tasks.probe import probe
from hookrun.tasks.similarity import linear_cka

SEEN = "+hooks.seen={select: [flatten,layers.1,fc], hook: forward, action: capture}"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the measures


def test_a_probe_finds_a_linear_boundary_and_nothing_in_noise() -> None:
    x = normal(400, 5)
    labels = (x[:, 0] * 100 + x[:, 1] * 50 > 7).long()
    found = probe(x * torch.tensor([1, 100, 1, 1, 1.0]) + 3, labels, seed=0)
    assert found.score == "accuracy"
    assert found.test > 0.9 > 0.7 > found.chance
    noise = probe(normal(400, 5, seed=1), labels, seed=0)
    assert noise.test == pytest.approx(noise.chance, abs=0.15)


def test_its_weights_are_for_the_features_as_they_are() -> None:
    x = normal(300, 4) * torch.tensor([0.1, 1, 10, 100.0]) + 5
    labels = (x[:, 3] > 50).long()
    found = probe(x, labels, seed=0)
    scores = x @ found.weights["weight"].T + found.weights["bias"]
    assert scores.shape == (300, 1)  # of two classes: positive for the second
    assert ((scores[:, 0] > 0) == labels).float().mean() > 0.95


def test_numbers_are_predicted_by_regression() -> None:
    x = normal(200, 6)
    y = x @ normal(6, 2, seed=1) + 4
    found = probe(x, y, seed=0)
    assert (found.score, found.weights["weight"].shape) == ("r2", (2, 6))
    assert found.test > 0.99
    assert found.chance < 0.05
    assert_close(x @ found.weights["weight"].T + found.weights["bias"], y, rtol=0.05, atol=0.1)


def test_a_class_of_one_sample_does_not_stop_it() -> None:
    labels = torch.tensor([0] * 20 + [1] * 20 + [2])
    assert 0 <= probe(normal(41, 3), labels, seed=0).test <= 1


@pytest.mark.parametrize("width", [3, 50], ids=["fewer features than samples", "more"])
def test_cka_is_one_for_rotated_and_scaled_features_and_small_for_unrelated_ones(width: int) -> None:
    x = normal(30, width)
    rotation = torch.linalg.qr(normal(width, width, seed=1)).Q
    assert linear_cka(x, x) == pytest.approx(1)
    assert linear_cka(x, 3 * x @ rotation + 7) == pytest.approx(1, abs=1e-5)
    other = normal(2000, 3, seed=2)
    assert linear_cka(normal(2000, 3), other) < 0.05
    assert linear_cka(x, torch.ones(30, 2)) == 0


def test_cka_is_the_formula_of_the_paper() -> None:
    x, y = normal(12, 4).numpy(), normal(12, 20, seed=1).numpy()
    center = np.eye(12) - 1 / 12
    k, l = center @ x @ x.T @ center, center @ y @ y.T @ center  # noqa: E741
    expected = np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l))
    assert linear_cka(torch.from_numpy(x), torch.from_numpy(y)) == pytest.approx(expected, rel=1e-5)


def test_too_few_samples_are_told() -> None:
    with pytest.raises(hookrun.HookrunError, match="at least 40 samples for 10 classes, 30 were captured"):
        probe(normal(30, 3), torch.arange(10).repeat(3), seed=0)


# ---- the tasks


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("captured") / "run"
    small = ("compute.device=cpu", "compute.threads=1", "model=mlp", "task=predict")
    assert main([*small, SEEN, f"hydra.run.dir={path}"]) == 0
    return hookrun.open_run(path)


def test_probes_of_a_run(run: Any, captured: Run, capsys: Any) -> None:
    found = run("task=probe", f"task.run={captured.path}")
    by_module = {line["module"]: line for line in found.metrics}
    assert list(by_module) == ["flatten", "layers.1", "fc"]
    assert by_module["flatten"]["accuracy"] > 0.85  # the pixels themselves tell the digits
    assert all(line["chance"] < 0.2 and line["samples"] == 359 for line in found.metrics)
    printed = capsys.readouterr().out
    assert "by chance" in printed and "layers.1" in printed
    weights = load_file(found.path / "probes.safetensors")
    assert weights["fc.weight"].shape == (10, 10)
    again = run("task=probe", f"task.run={captured.path}")
    assert again.metrics == found.metrics


def test_similarity_of_a_run(run: Any, captured: Run) -> None:
    found = run("task=similarity", f"task.run={captured.path}", "task.capture=seen")
    table = {(line["module"], line["other"]): line["cka"] for line in found.metrics}
    assert len(table) == 9
    assert all(table[name, name] == pytest.approx(1) for name in ("flatten", "layers.1", "fc"))
    assert table["flatten", "fc"] == pytest.approx(table["fc", "flatten"])
    assert table["layers.1", "fc"] > table["flatten", "fc"]


@pytest.mark.usefixtures("pages")
def test_wide_rows_are_projected_where_that_is_asked_for_and_said(
    run: Any, captured: Run, capsys: Any
) -> None:
    whole = run("task=similarity", f"task.run={captured.path}").metrics
    assert not any("projection" in line for line in whole)
    found = run("task=similarity", f"task.run={captured.path}", "task.project=48")
    for ours, theirs in zip(found.metrics, whole, strict=True):
        assert ours["cka"] == pytest.approx(theirs["cka"], abs=0.2)
    probes = run("task=probe", f"task.run={captured.path}", "task.project=48")
    wide, _, narrow = probes.metrics
    assert (wide["features"], narrow["features"], "projection" in narrow) == (64, 10, False)
    said = "random projection (count sketch) to 48 features, seed 0"
    assert wide["projection"] == said and said in capsys.readouterr().out
    for each in (found, probes):
        assert said in (each.path / "report.html").read_text()
    weights = load_file(probes.path / "probes.safetensors")
    assert weights["flatten.weight"].shape == (10, 64), "for the features as they were captured"


def test_what_does_not_fit_into_the_allowed_memory_is_refused_beforehand(
    run: Any, refused: Any, captured: Run, capsys: Any
) -> None:
    for task in ("probe", "similarity"):
        said = refused(f"task={task}", f"task.run={captured.path}", "task.max_bytes=10000")
        assert "task.max_bytes" in said and "of memory, and 10 kB are allowed" in said
        assert "flatten has 359 rows of [64]" in said and "task.max_bytes=100000000" in said
    run("task=similarity", f"task.run={captured.path}")
    assert "memory: about" in capsys.readouterr().out


def test_a_probe_of_more_features_than_samples_is_the_one_of_all_features() -> None:
    x, labels = normal(80, 300).double() * torch.linspace(0.1, 9, 300) + 3, torch.arange(80) % 3
    x[:, 7] = 5  # does not vary
    for y in (labels, x[:, :4].sum(1)):
        found = fit(Features("x", x, block_bytes=8 * 300 * 7), y, seed=4)
        parts = train_test_split(x.numpy(), y.numpy(), test_size=0.25, random_state=4,
                                 stratify=y.numpy() if y is labels else None)  # fmt: skip
        model = (
            LogisticRegression(max_iter=9000, tol=1e-8)
            if y is labels
            else RidgeCV(alphas=np.logspace(-3, 4, 8))
        )
        theirs = make_pipeline(StandardScaler(), model).fit(parts[0], parts[2])
        assert found.test == pytest.approx(theirs.score(parts[1], parts[3]), abs=1e-3)
        weight = np.atleast_2d(theirs[1].coef_) / theirs[0].scale_
        assert_close(found.weights["weight"].numpy(), weight.astype(np.float32), rtol=1e-3, atol=1e-5)


def test_cka_is_the_same_by_features_and_by_samples_in_tiles() -> None:
    tensors = [normal(50, width, seed=width) for width in (3, 20, 90)]
    features = [Features(str(x.shape[1]), x, block_bytes=8 * 90 * 7) for x in tensors]
    whole = linear_cka_of_all(features, Way(by_features=True, tile=50, needed=0))
    for tile in (50, 16):
        assert_close(linear_cka_of_all(features, Way(by_features=False, tile=tile, needed=0)), whole)
    x, y = (each - each.mean(0) for each in tensors[1:])
    expected = (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())
    assert float(whole[1, 2]) == pytest.approx(float(expected), rel=1e-5)


LARGE = """
import resource, sys
from hookrun.cli import main
import hookrun.tasks.loop.linear_probe, hookrun.tasks.loop.cka
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
limit = now + 700 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
reads = "task.run=wide", "task.max_bytes=200000000"
sys.exit(max(main([f"task={task}", f"hydra.run.dir={task}", *reads]) for task in ("probe", "similarity")))
"""


def test_wide_captures_are_analysed_in_little_memory(tmp_path: Path) -> None:
    x = normal(40, 3, 112, 112)
    save_file({"input": x, "target": torch.arange(40) % 2}, "wide.safetensors")
    writer = RunDir.create("wide")
    for module in ("a", "b"):
        writer.captures.add("seen", module, x, sample_ids=range(40), epoch=0, step=0, call=0, split="val")
    writer.close()
    writer.set_status("done")
    (tmp_path / "wide/.hydra").mkdir()
    data_of = "{name: tensors, args: {file: wide.safetensors, val_fraction: 1, num_classes: 2}}"
    (tmp_path / "wide/.hydra/config.yaml").write_text(
        f"seed: 0\ntask: {{name: predict, split: val}}\ndata: {data_of}\n"
    )
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (pair,) = (
        line
        for line in hookrun.open_run("similarity").metrics
        if (line["module"], line["other"]) == ("a", "b")
    )
    assert pair["cka"] == pytest.approx(1)


def test_what_is_missing_is_told_and_nothing_is_left(refused: Any, run: Any, captured: Run) -> None:
    small = ("model=mlp", "train.epochs=1", "train.limit_batches=1")
    bare = run(*small, "task=predict")
    one = run(*small, "task=predict", "+hooks.a={select: fc, hook: forward, action: capture}")
    trained = run(*small, "+hooks.a={select: fc, hook: grad, action: capture}")
    for task in ("task=probe", "task=similarity"):
        assert "none is named\n      name its directory: task.run=outputs/latest" in refused(task), task
        assert "task.run: there is no" in refused(task, "task.run=nowhere"), task
        said = refused(task, f"task.run={captured.path}", "task.capture=sen")
        assert "task.capture: found 'sen'\n      did you mean 'seen'?" in said, task
        said = refused(task, f"task.run={bare.path}")
        assert "captured nothing" in said and "action: capture" in said, task
        said = refused(task, f"task.run={trained.path}")
        assert "no module of it has one row for each sample" in said, task
    assert "there is nothing to compare it with" in refused("task=similarity", f"task.run={one.path}")


def test_one_number_for_each_sample_is_a_layer_too(run: Any) -> None:
    seen = SEEN.replace("action: capture", "action: capture, reduce: norm")
    source = run("model=mlp", "task=predict", seen)
    for task in ("task=probe", "task=similarity"):
        found = run(task, f"task.run={source.path}")
        assert {line["module"] for line in found.metrics} == {"flatten", "layers.1", "fc"}, task
