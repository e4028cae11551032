"""task=probe and task=similarity: results from the captures of a run, without running a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import normal
from safetensors.torch import load_file, save_file

import hookrun
from hookrun.cli import main
from hookrun.store.reader import Run
from hookrun.store.run_dir import RunDir

SEEN = "+hooks.seen={select: [flatten,layers.1,fc], hook: forward, action: capture}"


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
    assert by_module["flatten"]["accuracy"] > 0.85  # even the pixels predict the digits
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
def test_wide_rows_are_projected_on_request_with_a_note(run: Any, captured: Run, capsys: Any) -> None:
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


def test_an_analysis_beyond_the_allowed_memory_is_refused_before_it_starts(
    run: Any, refused: Any, captured: Run, capsys: Any
) -> None:
    for task in ("probe", "similarity"):
        said = refused(f"task={task}", f"task.run={captured.path}", "task.max_bytes=10000")
        assert "task.max_bytes" in said and "of memory, and 10 kB are allowed" in said
        assert "flatten has 359 rows of [64]" in said and "task.max_bytes=100000000" in said
    run("task=similarity", f"task.run={captured.path}")
    assert "memory: about" in capsys.readouterr().out


LARGE = """
import resource, sys
from hookrun.cli import main
import hookrun.tasks.analysis.linear_probe, hookrun.tasks.analysis.cka
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
limit = now + 700 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
reads = "task.run=wide", "task.max_bytes=200000000"
sys.exit(max(main([f"task={task}", f"hydra.run.dir={task}", *reads]) for task in ("probe", "similarity")))
"""


def test_wide_captures_are_analysed_with_limited_memory(tmp_path: Path) -> None:
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


def test_missing_runs_and_captures_are_errors_that_leave_no_files(
    refused: Any, run: Any, captured: Run
) -> None:
    small = ("model=mlp", "train.epochs=1", "train.limit_batches=1")
    bare = run(*small, "task=predict")
    one = run(*small, "task=predict", "+hooks.a={select: fc, hook: forward, action: capture}")
    trained = run(*small, "+hooks.a={select: fc, hook: grad, action: capture}")
    for task in ("task=probe", "task=similarity"):
        assert "no run is named\n      name its directory: task.run=outputs/latest" in refused(task), task
        assert "task.run: there is no" in refused(task, "task.run=nowhere"), task
        said = refused(task, f"task.run={captured.path}", "task.capture=sen")
        assert "task.capture: found 'sen'\n      did you mean 'seen'?" in said, task
        said = refused(task, f"task.run={bare.path}")
        assert "captured nothing" in said and "action: capture" in said, task
        assert f"the newest one beside it: task.run={trained.path}" in said, task
        said = refused(task, f"task.run={trained.path}")
        assert "no module of this hook has one row for each sample" in said, task
    assert "there is nothing to compare it with" in refused("task=similarity", f"task.run={one.path}")


def test_one_number_for_each_sample_is_a_layer_too(run: Any) -> None:
    seen = SEEN.replace("action: capture", "action: capture, reduce: norm")
    source = run("model=mlp", "task=predict", seen)
    for task in ("task=probe", "task=similarity"):
        found = run(task, f"task.run={source.path}")
        assert {line["module"] for line in found.metrics} == {"flatten", "layers.1", "fc"}, task
