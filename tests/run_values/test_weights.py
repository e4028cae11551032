"""`model.weights: {run: NAME}` becomes the file of that run's checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hookrun.errors import SpecError
from hookrun.run_values.weights import other_runs, with_found_weights
from hookrun.spec import Experiment
from hookrun.tasks import parse_experiment


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
