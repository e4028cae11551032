"""The runs that values name: by directory, as a need, or as the previous run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hookrun.engine.actions.values import RunValue
from hookrun.engine.spec import Spec, parse_spec
from hookrun.errors import Problem, SpecError
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.run_values.runs import (
    RunReferences,
    differences,
    other_runs,
    padded_otherwise,
    used_runs,
    with_found_weights,
    with_origins,
)
from hookrun.run.experiment.settings import Settings
from hookrun.run.tasks import parse_experiment
from hookrun.store.files import StoreError

HOOK = {"select": "fc", "hook": "forward", "action": "scale"}


def test_a_name_is_a_need_a_directory_or_the_previous_run(run, tmp_path, monkeypatch) -> None:
    runs = RunReferences({"base": str(run), "later": None})
    assert runs.open("base") is runs.open("base"), "found once, since a link may change"
    assert runs.open("later") is None
    found = runs.open(str(run))
    assert found is not None
    assert found.path == run
    monkeypatch.setenv("HOOKRUN_OUTPUT", str(tmp_path))
    with pytest.raises(StoreError, match="there is no finished run"):
        RunReferences().open("previous")
    (tmp_path / "outputs").mkdir()
    run.rename(tmp_path / "outputs/run")
    before = RunReferences().open("previous")
    assert before is not None
    assert before.path == tmp_path / "outputs/run"


def test_a_missing_run_is_reported_with_the_nearest_need(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="among the needs: did you mean 'base'"):
        RunReferences({"base": None, "previous": None}).open("bsae")
    with pytest.raises(StoreError) as refusal:
        RunReferences().open(str(tmp_path / "x"))
    assert "needs" not in str(refusal.value)


def test_used_runs_are_listed_with_plan_hash(run: Path) -> None:
    runs = RunReferences({"base": str(run), "later": None})
    used = runs.used("task.run", "base")
    assert used is not None
    assert runs.used("task.run", "later") is None
    found = (used.where, used.run, used.path, used.need, used.plan)
    assert found == ("task.run", "base", str(run), True, "ab" * 32)
    assert used.manifest == runs.open("base").status["manifest"]  # type: ignore[union-attr]


def test_disabled_hooks_use_no_run(run: Path) -> None:
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


def test_a_run_that_runs_first_has_no_file_yet() -> None:
    found = with_found_weights(experiment({"run": "base"}, base=None))
    assert found.settings.model.weights is None
    assert found.takes == {"model.weights.run": "base"}
    assert other_runs(found) == ()


def test_weights_by_path_are_unchanged(run: Path) -> None:
    plain = experiment("x.safetensors")
    assert with_found_weights(plain) is plain


# --- what must be equal in both runs, and notes on differences


def spec(run: Path | str) -> Spec:
    value = {"run": str(run), "capture": "seen"}
    return parse_spec({"h": {"select": "fc", "hook": "forward", "action": "scale", "factor": value}})


def change(run: Path, **sections: Any) -> None:
    path = run / ".hydra/config.yaml"
    path.write_text(json.dumps(json.loads(path.read_text()) | sections))


def test_only_different_runs_have_notes(run: Path, settings: Settings) -> None:
    assert differences(spec(run), settings, RunReferences()) == ()
    data = {"name": "digits", "root": "/x", "args": {}, "transforms": {}}
    change(run, seed=3, data=data, model={"name": "cnn", "args": {"channels": [1, 2]}, "weights": None})
    (note,) = differences(spec(run), settings, RunReferences())
    assert note.startswith(f"values come from {run}, where model.args.channels is [1, 2] there and ")
    assert "data.root is '/x' there and None here" in note
    assert "seed is 3 there and 0 here" in note


def test_a_note_has_the_arguments_that_differ_alone(run: Path) -> None:
    here = {"a": 1, "b": {"c": 2, "d": 3}, "only": 5, "same": "x"}
    model = {"name": "python", "factory": "m:f", "args": here}
    settings = parse_experiment({"model": model, "data": {"name": "digits"}, "hooks": {}}).settings
    there = {"a": 1, "b": {"c": 2, "d": 4}, "other": [6], "same": "x"}
    change(run, model={"name": "python", "factory": "m:f", "args": there})
    (note,) = differences(spec(run), settings, RunReferences())
    assert note == (
        f"values come from {run}, where model.args.b.d is 4 there and 3 here; model.args.other is [6] there and None "
        "here; model.args.only is None there and 5 here"
    )
    change(run, model={"name": "python", "factory": "m:f", "args": {}})
    (note,) = differences(spec(run), settings, RunReferences())
    assert "model.args is" not in note
    assert "model.args.b.c is None there and 2 here" in note


def test_a_value_of_any_length_is_shortened(run: Path, settings: Settings) -> None:
    change(run, seed="x" * 5000)
    (note,) = differences(spec(run), settings, RunReferences())
    assert len(note) < 1000


def test_a_run_that_runs_first_has_a_note(settings: Settings) -> None:
    (note,) = differences(spec("base"), settings, RunReferences({"base": None}))
    assert note.startswith("base runs first")
    assert differences(spec("nowhere"), settings, RunReferences()) == ()


def test_other_padding_changes_the_positions_of_tokens(run: Path, settings: Settings) -> None:
    value = RunValue.model_validate({"run": str(run), "capture": "seen"})
    assert padded_otherwise(value, RunReferences(settings=settings)) is None
    change(run, data={"name": "names", "args": {"padding": "left"}})
    why = padded_otherwise(value, RunReferences(settings=settings))
    assert why is not None
    assert "data.args.padding is 'left' there and 'right' here" in why
    minus = RunValue.model_validate(
        {"run": "base", "capture": "seen", "minus": {"run": str(run), "capture": "seen"}}
    )
    assert padded_otherwise(minus, RunReferences({"base": None}, settings)) is not None
    assert padded_otherwise(value, RunReferences()) is None


def test_a_problem_of_the_hook_names_the_plan_of_its_run(run: Path) -> None:
    problems = [Problem("hooks.h.factor", "x", "y"), Problem("hooks.g", "x")]
    first, second = with_origins(problems, spec(run), RunReferences())
    assert first.hint == f"y; the run {run} has the plan of a CNN, hash {'ab' * 6}: fc [3, 2]"
    assert second == problems[1]
    assert with_origins(problems, spec("nowhere"), RunReferences()) == problems
