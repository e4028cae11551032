"""folds.safetensors: what a run's folds have accumulated is read back, and a damaged or foreign file is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.engine.values.folded import TOP
from hookrun.store.captures.tensor_file import read_tensors, write_tensors
from hookrun.store.files import StoreError
from hookrun.store.folds import read_folds
from hookrun.store.verify import verify


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A recorded run and its folds in memory."""
    folder = tmp_path_factory.mktemp("folds") / "run"
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    of = ["mean", "cov", {"quantiles": [0.5]}, {"top": 2}]
    spec = {
        "units": {"select": ["0", "1"], "hook": "forward", "action": "fold", "of": of},
        "labels": {"select": "1", "hook": "forward", "action": "fold", "of": {"top": 2}, "by": "label"},
    }
    with hookrun.record(model, spec, run_dir=folder) as hooks:
        for batch in torch.randn(20, 4).split(5):
            hooks.labels = [3, 1, 3, 1, 3]
            model(batch)
    return folder, hooks.folds


def test_it_is_read_as_it_was_in_memory(recorded: tuple[Path, Any]) -> None:
    folder, folds = recorded
    run = hookrun.open_run(folder)
    assert {hook: list(modules) for hook, modules in run.folds.items()} == {
        "units": ["0", "1"],
        "labels": ["1"],
    }
    for hook, modules in folds.items():
        for module, fold in modules.items():
            found = run.folds[hook][module]
            assert (found.labels, found.at, found.places) == (fold.labels, list(fold.at), fold.places)
            for name, x in fold.tensors.items():
                assert torch.equal(x, found.tensors[name]), name
    assert run.folds["labels"]["1"].labels == [1, 3]
    assert run.folds["labels"]["1"].cov is None
    assert verify(folder).bad == []
    with pytest.raises(KeyError, match="no hook 'unit' in the folds of run: did you mean 'units'"):
        run.folds["unit"]
    with pytest.raises(KeyError, match="no module 'fc'"):
        run.folds["units"]["fc"]


def test_a_run_without_folds_has_none(tmp_path: Path) -> None:
    assert dict(read_folds(tmp_path, {})) == {}


Change = Callable[[dict[str, Tensor], dict[str, str]], Any]
DAMAGES: dict[str, tuple[Change, str]] = {
    "no contents": (lambda tensors, about: about.clear(), "does not describe its folds"),
    "not JSON": (lambda tensors, about: about.update(folds="["), "does not describe its folds"),
    "other contents": (
        lambda tensors, about: about.update(folds='[{"hook": 3}]'),
        "found an int|has no module",
    ),
    "no mean": (lambda tensors, about: tensors.pop("0.mean"), "mean"),
    "no samples": (lambda tensors, about: tensors.pop("0.top.samples"), "top.samples"),
    "another tensor": (lambda tensors, about: tensors.update({"0.more": torch.ones(1)}), "more"),
    "other shape": (
        lambda tensors, about: tensors.update({"0.cov": torch.ones(9, 3)}),
        "cov of units has shape",
    ),
    "no places": (
        lambda tensors, about: tensors.update({f"0.{name}": tensors[f"0.{name}"][:, :0] for name in TOP}),
        r"top\.\w+ of units has shape \[3, 0\]",
    ),
    "no units": (
        lambda tensors, about: tensors.update({"0.mean": torch.ones(())}),
        "of units has shape",
    ),
    "no numbers": (
        lambda tensors, about: tensors.update({"0.mean": torch.ones(3).int()}),
        "mean of units is",
    ),
    "no positions": (
        lambda tensors, about: tensors.update({"0.top.samples": torch.ones(3, 2)}),
        "samples of units is",
    ),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=list(DAMAGES))
def test_a_file_of_another_form_is_refused(
    recorded: tuple[Path, Any], tmp_path: Path, damage: Change, says: str
) -> None:
    tensors, about = read_tensors(recorded[0] / "folds.safetensors")
    damage(tensors, about)
    with (tmp_path / "folds.safetensors").open("wb") as file:
        write_tensors(file, tensors, about)
    with pytest.raises(StoreError, match=says):
        read_folds(tmp_path, {})
