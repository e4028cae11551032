"""task=probe and task=similarity: results of the captures of a run, without a model; their keys; resuming."""

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
from hookrun.errors import SpecError
from hookrun.spec import Experiment
from hookrun.store.reader import Run
from hookrun.store.run_dir import RunDir
from hookrun.tasks import parse_experiment, task_of
from hookrun.tasks.analysis import cka, linear_probe
from hookrun.tasks.run import resuming

SMALL = ("compute.device=cpu", "compute.threads=1")
SEEN = "+hooks.seen={select: [flatten,layers.1,fc], hook: forward, action: capture}"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("captured") / "run"
    assert main([*SMALL, "model=mlp", "task=predict", SEEN, f"hydra.run.dir={path}"]) == 0
    return hookrun.open_run(path)


def test_probes_of_a_run(run: Any, captured: Run, capsys: Any) -> None:
    found = run("task=probe", f"task.run={captured.path}")
    by_module = {line["module"]: line for line in found.metrics}
    assert list(by_module) == ["flatten", "layers.1", "fc"]
    assert by_module["flatten"]["accuracy"] > 0.85  # even the pixels predict the digits
    assert all(line["majority"] < 0.2 and line["samples"] == 359 for line in found.metrics)
    printed = capsys.readouterr().out
    assert "majority" in printed and "control" in printed and "layers.1" in printed
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


def test_an_analysis_beyond_the_allowed_memory_is_refused_before(run, refused, captured, capsys) -> None:
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


def test_missing_runs_and_captures_are_errors_that_leave_no_files(refused, run, captured) -> None:
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


def experiment(task: dict[str, Any], **sections: Any) -> Experiment:
    plain = {"model": {"name": "cnn"}, "data": {"name": "digits"}}
    return parse_experiment(plain | sections | {"task": {"name": "probe"} | task})


def test_memory_and_features_are_whole_numbers_within_bounds() -> None:
    assert experiment({"max_bytes": 2**50, "project": 2**24})
    for key, most in (("max_bytes", 2**50), ("project", 2**24)):
        for value in (0, -1, 1.0, True, "1", most + 1):
            with pytest.raises(SpecError, match=f"task.{key}"):
                experiment({key: value})


def test_hooks_and_changed_settings_of_a_run_are_unused() -> None:
    hooks = {"h": {"select": "fc", "hook": "forward", "action": "capture"}}
    some = experiment({}, train={"epochs": 9}, compute={"compile": True}, hooks=hooks)
    assert task_of(some).unused(some) == ["train.epochs", "compute.compile", "hooks"]
    none = experiment({})
    assert task_of(none).unused(none) == []


class Killed(BaseException):
    """Raised where the process is killed."""


def recorded(path: Path) -> dict[str, Any]:
    files = [path / name for name in ("metrics.jsonl", "probes.safetensors") if (path / name).exists()]
    left = sorted(each.name for each in path.iterdir() if each.name != "report.html")
    return {"left": left, **{file.name: file.read_bytes() for file in files}}


def test_a_killed_analysis_is_resumed_with_its_next_part(run, tmp_path, monkeypatch) -> None:
    """Recorded parts are not computed again."""
    seen = "+hooks.seen={select: [layers.1, fc], hook: forward, action: capture}"
    captured = run("model=mlp", "task=predict", "train.limit_batches=2", seen)
    calls = list[str]()
    for module, name in ((linear_probe, "fit"), (cka, "_by_samples"), (cka, "_by_features")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real: calls.append("") or real(*args))
    for task, parts in (("probe", 2), ("similarity", 1)):
        argv = [f"task={task}", f"task.run={captured.path}"]
        assert main([*SMALL, *argv, f"hydra.run.dir={task}"]) == 0
        expected = recorded(tmp_path / task)
        for part in range(1, parts + 1):
            name = f"{task}{part}"
            real_write, left = resuming.write_state, [part]

            def write(*args: Any, real: Any = real_write, left: list[int] = left, **options: int) -> None:
                real(*args, **options)
                left[0] -= 1
                if not left[0]:
                    raise Killed

            with monkeypatch.context() as patch, pytest.raises(Killed):
                patch.setattr(resuming, "write_state", write)
                main([*SMALL, *argv, f"hydra.run.dir={name}"])
            calls.clear()
            assert hookrun.open_run(tmp_path / name).status["status"] != "done"
            assert main([*SMALL, f"resume={name}"]) == 0
            assert recorded(tmp_path / name) == expected
            assert len(calls) == parts - part
