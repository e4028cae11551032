"""task=probe and task=similarity: results of the captures of a run, without a model; their keys; resuming."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import normal
from run_files import written
from safetensors.torch import load_file, save_file

import hookrun
from hookrun.cli import main
from hookrun.errors import SpecError
from hookrun.report import write_report
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.passes import resuming
from hookrun.run.tasks import parse_experiment
from hookrun.run.tasks.captured import cka
from hookrun.store.reader import Run
from hookrun.studies.captures import probing

SMALL = ("compute.device=cpu", "compute.threads=1")
LAYERS = "select: [flatten,layers.1,fc], hook: forward, action: capture"
HOOKS = "+hooks.seen={" + LAYERS + "}", "+hooks.norms={" + LAYERS + ", reduce: norm}"


@pytest.fixture
def captured(shared: Any) -> Run:
    return shared("model=mlp", "task=predict", *HOOKS)


@pytest.fixture
def analysed(shared: Any, captured: Run) -> Callable[[str], Run]:
    """Makes an analysis of what was captured."""
    return lambda task: shared(f"task={task}", *seen(captured))


def seen(captured: Run) -> list[str]:
    return [f"task.run={captured.path}", "task.capture=seen"]


def test_probes_of_a_run(analysed: Any) -> None:
    found = analysed("probe")
    by_module = {line["module"]: line for line in found.metrics}
    assert list(by_module) == ["flatten", "layers.1", "fc"]
    assert by_module["flatten"]["accuracy"] > 0.85  # even the pixels predict the digits
    for line in found.metrics:
        assert line["majority"] < 0.2
        assert line["samples"] == 359
    weights = load_file(found.path / "probes.safetensors")
    assert weights["fc.weight"].shape == (10, 10)


def test_similarity_of_a_run(analysed: Any) -> None:
    table = {(line["module"], line["other"]): line["cka"] for line in analysed("similarity").metrics}
    assert len(table) == 9
    for name in ("flatten", "layers.1", "fc"):
        assert table[name, name] == pytest.approx(1)
    assert table["flatten", "fc"] == pytest.approx(table["fc", "flatten"])
    assert table["layers.1", "fc"] > table["flatten", "fc"]


def test_wide_rows_are_projected_on_request_with_a_note(executed, captured, analysed, capsys) -> None:
    compared = analysed("similarity")
    for line in compared.metrics:
        assert "projection" not in line
    found = executed("task=similarity", *seen(captured), "task.project=48")
    for ours, theirs in zip(found.metrics, compared.metrics, strict=True):
        assert ours["cka"] == pytest.approx(theirs["cka"], abs=0.2)
    assert "memory: about" in capsys.readouterr().out
    probes = executed("task=probe", *seen(captured), "task.project=48")
    wide, _, narrow = probes.metrics
    assert (wide["features"], narrow["features"], "projection" in narrow) == (64, 10, False)
    said = "random projection (count sketch) to 48 features, seed 0"
    printed = capsys.readouterr().out
    assert wide["projection"] == said
    assert said in printed
    assert "majority" in printed
    assert "control" in printed
    assert "layers.1" in printed
    for each in (found, probes):
        assert said in write_report(each.path).read_text()
    weights = load_file(probes.path / "probes.safetensors")
    assert weights["flatten.weight"].shape == (10, 64), "for the features as they were captured"


def test_an_analysis_beyond_the_allowed_memory_is_refused_before(refused: Any, captured: Run) -> None:
    for task in ("probe", "similarity"):
        said = refused(f"task={task}", *seen(captured), "task.max_bytes=10000")
        assert "task.max_bytes" in said
        assert "of memory, and 10 kB are allowed" in said
        assert "flatten has 359 rows of [64]" in said
        assert "task.max_bytes=100000000" in said


LARGE = """
import resource, sys
from hookrun.cli import main
import hookrun.studies.captures.probing, hookrun.run.tasks.captured.cka
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
    written(tmp_path / "wide", {"a": x, "b": x})
    (tmp_path / "wide/.hydra").mkdir()
    data_of = "{name: tensors, args: {file: wide.safetensors, val_fraction: 1, num_classes: 2}}"
    (tmp_path / "wide/.hydra/config.yaml").write_text(
        f"seed: 0\ntask: {{name: predict, split: val}}\ndata: {data_of}\n"
    )
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pairs = {(line["module"], line["other"]): line["cka"] for line in hookrun.open_run("similarity").metrics}
    assert pairs["a", "b"] == pytest.approx(1)


def test_missing_captures_leave_no_files(refused, captured, tmp_path) -> None:
    bare = written(tmp_path / "runs/bare").path
    one = written(tmp_path / "runs/one", {"fc": torch.ones(3, 2)}).path
    trained = written(tmp_path / "runs/trained", {"fc": torch.ones(3, 2)}, by_sample=False).path
    for task in ("task=probe", "task=similarity"):
        assert "no run is named\n      name its directory: task.run=outputs/latest" in refused(task), task
        assert "task.run: there is no" in refused(task, "task.run=nowhere"), task
        said = refused(task, f"task.run={captured.path}", "task.capture=sen")
        assert "task.capture: found 'sen'\n      did you mean 'seen'?" in said, task
        assert "captured seen, norms" in refused(task, f"task.run={captured.path}"), task
        said = refused(task, f"task.run={bare}")
        assert "captured nothing" in said, task
        assert "action: capture" in said, task
        assert f"the newest one beside it: task.run={trained}" in said, task
        said = refused(task, f"task.run={trained}")
        assert "no module of this hook has one row for each sample" in said, task
    assert "there is nothing to compare it with" in refused("task=similarity", f"task.run={one}")


@pytest.mark.parametrize("rows", [1, 2])
def test_a_similarity_of_fewer_than_three_rows_is_refused(rows: int, shared: Any, refused: Any) -> None:
    limits = "train.limit_batches=1", f"data.batch_size={rows}"
    few = shared("model=mlp", "task=predict", HOOKS[0], *limits)
    said = refused("task=similarity", f"task.run={few.path}")
    assert f"task.run: only {rows} row{'s' * (rows > 1)} captured" in said
    assert "capture at least 3 samples" in said


@pytest.mark.parametrize("task", ["probe", "similarity"])
def test_one_number_for_each_sample_is_a_layer_too(executed: Any, captured: Run, task: str) -> None:
    found = executed(f"task={task}", f"task.run={captured.path}", "task.capture=norms")
    assert {line["module"] for line in found.metrics} == {"flatten", "layers.1", "fc"}


def experiment(task: dict[str, Any], **sections: Any) -> Experiment:
    plain = {"model": {"name": "cnn"}, "data": {"name": "digits"}}
    return parse_experiment(plain | sections | {"task": {"name": "probe"} | task})


def test_features_are_whole_numbers_within_bounds() -> None:
    assert experiment({"max_bytes": 2**50, "project": 2**24})
    for key, most in (("max_bytes", 2**50), ("project", 2**24)):
        for value in (0, -1, 1.0, True, "1", most + 1):
            with pytest.raises(SpecError, match=f"task.{key}"):
                experiment({key: value})


class Killed(BaseException):
    """Raised where the process is killed."""


def recorded(path: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in path.iterdir() if file.suffix in (".jsonl", ".safetensors")
    }


@pytest.mark.parametrize(("task", "parts", "part"), [("probe", 3, 1), ("similarity", 1, 1)])
def test_a_killed_analysis_is_resumed_with_its_next_part(
    task: str, parts: int, part: int, captured: Run, analysed: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Recorded parts are not computed again, also after the last one."""
    expected = recorded(analysed(task).path)
    calls = list[str]()
    left = [part]
    for module, name in ((probing, "fit"), (cka, "_by_samples"), (cka, "_by_features")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real: calls.append("") or real(*args))
    real_write = resuming.write_state

    def write(*args: Any, **options: int) -> None:
        real_write(*args, **options)
        left[0] -= 1
        if not left[0]:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(resuming, "write_state", write)
        patch.setattr(resuming, "CHEAP", float("inf"))  # each part is saved, however slow the machine is
        main([*SMALL, f"task={task}", *seen(captured), "hydra.run.dir=killed"])
    calls.clear()
    assert hookrun.open_run(tmp_path / "killed").status["status"] != "done"
    assert main([*SMALL, "resume=killed"]) == 0
    assert recorded(tmp_path / "killed") == expected
    assert not list(tmp_path.glob("killed/**/state_*"))
    assert len(calls) == parts - part
