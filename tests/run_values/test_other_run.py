"""What must be equal in both runs, and the notes on differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hookrun.actions.values import RunValue
from hookrun.errors import Problem
from hookrun.run_values.runs import RunReferences, differences, padded_otherwise, with_origins
from hookrun.spec import Settings, Spec, parse_spec


def spec(run: Path | str) -> Spec:
    value = {"run": str(run), "capture": "seen"}
    return parse_spec({"h": {"select": "fc", "hook": "forward", "action": "scale", "factor": value}})


def change(run: Path, **sections: Any) -> None:
    path = run / ".hydra/config.yaml"
    path.write_text(json.dumps(json.loads(path.read_text()) | sections))


def test_equal_runs_have_no_notes_and_differences_have(run: Path, settings: Settings) -> None:
    assert differences(spec(run), settings, RunReferences()) == ()
    data = {"name": "digits", "root": "/x", "args": {}, "transforms": {}}
    change(run, seed=3, data=data, model={"name": "cnn", "args": {"channels": [1, 2]}, "weights": None})
    (note,) = differences(spec(run), settings, RunReferences())
    assert note.startswith(f"values come from {run}, where model.args is")
    assert "data.root is '/x' there and None here" in note and "seed is 3 there and 0 here" in note


def test_a_value_of_any_length_is_shortened(run: Path, settings: Settings) -> None:
    change(run, seed="x" * 5000)
    (note,) = differences(spec(run), settings, RunReferences())
    assert len(note) < 1000


def test_a_run_that_runs_first_has_a_note_and_a_missing_one_has_none(settings: Settings) -> None:
    (note,) = differences(spec("base"), settings, RunReferences({"base": None}))
    assert note.startswith("base runs first")
    assert differences(spec("nowhere"), settings, RunReferences()) == ()


def test_other_padding_changes_the_positions_of_tokens(run: Path, settings: Settings) -> None:
    value = RunValue.model_validate({"run": str(run), "capture": "seen"})
    assert padded_otherwise(value, RunReferences(settings=settings)) is None
    change(run, data={"name": "names", "args": {"padding": "left"}})
    why = padded_otherwise(value, RunReferences(settings=settings))
    assert why is not None and "data.args.padding is 'left' there and 'right' here" in why
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
