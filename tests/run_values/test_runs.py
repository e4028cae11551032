"""The runs that values name: by directory, as a need, or as the previous run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hookrun.errors import SpecError
from hookrun.run_values.runs import RunReferences, other_runs, used_runs, with_found_weights
from hookrun.spec import Experiment, parse_spec
from hookrun.store.files import StoreError
from hookrun.tasks import parse_experiment

HOOK = {"select": "fc", "hook": "forward", "action": "scale"}


def test_a_name_is_a_need_a_directory_or_the_previous_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = RunReferences({"base": str(run), "later": None})
    assert runs.open("base") is runs.open("base"), "found once, since a link may change"
    assert runs.open("later") is None
    found = runs.open(str(run))
    assert found is not None and found.path == run
    monkeypatch.setenv("HOOKRUN_OUTPUT", str(tmp_path))
    with pytest.raises(StoreError, match="there is no finished run"):
        RunReferences().open("previous")
    (tmp_path / "outputs").mkdir()
    run.rename(tmp_path / "outputs/run")
    before = RunReferences().open("previous")
    assert before is not None and before.path == tmp_path / "outputs/run"


def test_a_missing_run_is_reported_with_the_nearest_need(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="among the needs: did you mean 'base'"):
        RunReferences({"base": None, "previous": None}).open("bsae")
    with pytest.raises(StoreError) as refusal:
        RunReferences().open(str(tmp_path / "x"))
    assert "needs" not in str(refusal.value)


def test_used_runs_are_listed_with_plan_and_manifest(run: Path) -> None:
    runs = RunReferences({"base": str(run), "later": None})
    used = runs.used("task.run", "base")
    assert used is not None and runs.used("task.run", "later") is None
    assert (used.where, used.run, used.path, used.need, used.plan) == (
        "task.run",
        "base",
        str(run),
        True,
        "ab" * 32,
    )
    assert used.manifest == runs.open("base").status["manifest"]  # type: ignore[union-attr]


def test_disabled_hooks_and_missing_runs_use_none(run: Path) -> None:
    value = {"run": str(run), "capture": "seen"}
    hooks = {
        "on": HOOK | {"factor": value},
        "off": HOOK | {"factor": value, "enabled": False},
        "missing": HOOK | {"factor": value | {"run": "nowhere"}},
    }
    assert [used.where for used in used_runs(parse_spec(hooks), RunReferences())] == ["hooks.on.factor.run"]


def experiment(weights: Any, **runs: str | None) -> Experiment:
    parsed = parse_experiment(
        {"model": {"name": "cnn", "weights": weights}, "data": {"name": "digits"}, "hooks": {}}
    )
    return replace(parsed, runs=runs)


def test_the_run_is_replaced_by_the_file_of_its_checkpoint(run: Path) -> None:
    (run / "checkpoints").mkdir()
    (run / "checkpoints/best.safetensors").write_bytes(b"")
    found = with_found_weights(experiment({"run": "base", "checkpoint": "best"}, base=str(run)))
    assert found.settings.model.weights == str(run / "checkpoints/best.safetensors")
    assert found.takes["model.weights.run"] == "base"
    assert [(used.where, used.path, used.need) for used in other_runs(found)] == [
        ("model.weights.run", str(run), True)
    ]


def test_a_missing_checkpoint_is_refused_with_the_existing_ones(run: Path) -> None:
    (run / "checkpoints").mkdir()
    (run / "checkpoints/best.safetensors").write_bytes(b"")
    with pytest.raises(SpecError, match=r"model\.weights\.checkpoint: .* no checkpoint 'last'; it has best"):
        with_found_weights(experiment({"run": str(run)}))
    with pytest.raises(SpecError, match=r"model\.weights\.run: "):
        with_found_weights(experiment({"run": "nowhere"}))


def test_a_run_that_runs_first_has_a_note() -> None:
    found = with_found_weights(experiment({"run": "base"}, base=None))
    assert found.settings.model.weights is None
    assert "model.weights: those of base, which runs first" in found.notes
    assert other_runs(found) == ()


def test_weights_by_path_are_unchanged(run: Path) -> None:
    plain = experiment("x.safetensors")
    assert with_found_weights(plain) is plain
