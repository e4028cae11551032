"""The source of the weights and settings without effect are reported before the run and in its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookrun.config.yaml_files import load
from hookrun.models import origin
from hookrun.spec.experiment import Model, Train
from hookrun.store.reader import Run

SMALL = ["model=mlp", "compute.device=cpu", "compute.threads=1", "train.limit_batches=1", "train.epochs=1"]


@pytest.fixture
def trained(shared: Any, pages: None) -> Run:
    return shared(*SMALL)


@pytest.mark.usefixtures("pages")
def test_the_report_shows_where_the_weights_come_from(run: Any, trained: Run, capsys: Any) -> None:
    assert "<dt>weights</dt><dd>random</dd>" in _joined(trained.path)
    path = trained.path / "checkpoints/best.safetensors"
    capsys.readouterr()
    other = run(*SMALL[2:], "model=mlp", "task=evaluate", f"model.weights={path}")
    assert f"weights: {path}" in capsys.readouterr().out
    assert f"<dt>weights</dt><dd>{path}</dd>" in _joined(other.path)


@pytest.mark.usefixtures("pages")
def test_weights_by_a_link_are_recorded_as_the_target_of_the_link(run: Any, trained: Run) -> None:
    Path("newest").symlink_to(trained.path)
    typed = "model.weights=newest/checkpoints/last.safetensors"
    other = run(*SMALL[2:], "model=mlp", "task=evaluate", typed)
    meant = trained.path / "checkpoints/last.safetensors"
    assert load(other.path / ".hydra/config.yaml")["model"]["weights"] == str(meant)
    assert f"model.weights={meant}" in _joined(other.path) and typed not in _joined(other.path)


def _joined(run: Path) -> str:
    page = (run / "report.html").read_text(encoding="utf-8")
    return "".join(line.strip() for line in page.splitlines())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "cnn"}, "random"),
        ({"name": "resnet18", "weights": "IMAGENET1K_V1"}, "IMAGENET1K_V1"),
        ({"name": "python", "factory": "mine.models:build"}, "as mine.models:build makes them"),
        (
            {"name": "fcn_resnet50", "args": {"weights_backbone": "IMAGENET1K_V1"}},
            "random, with those of the backbone from IMAGENET1K_V1",
        ),
    ],
)
def test_every_kind_of_weights_has_a_description(config: dict[str, Any], expected: str) -> None:
    assert origin(Model(**config)) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["task=predict"], "train.epochs is not used by task=predict"),
        (
            ["task=evaluate", "train.optimizer.lr=1", "train.shuffle=false", "train.loss=output_sum"],
            "train.epochs, train.optimizer, train.shuffle are not used by task=evaluate",
        ),
        (["task=predict", "train.loss=output", "train.epochs=10"], "train.loss is not used by task=predict"),
        (
            ["task=export", "compute.precision=bf16", "train.epochs=10"],
            "compute.precision is not used by task=export",
        ),
    ],
)
def test_a_setting_without_effect_is_reported(overrides: list[str], expected: str, ready: Any) -> None:
    assert [note for note in ready(*SMALL, *overrides).notes if "not used by" in note] == [expected]


def test_an_analysis_reports_that_it_uses_no_hooks(executed: Any, capsys: Any) -> None:
    capture = "+hooks.h={select: [layers.1, fc], hook: forward, action: capture}"
    captured = executed("model=mlp", "task=predict", "train.limit_batches=1", capture)
    capsys.readouterr()
    executed("task=similarity", f"task.run={captured.path}", capture)
    assert "compute.device, compute.threads, hooks are not used by task=similarity" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["predict", "evaluate", "export"])
def test_settings_with_default_values_are_not_mentioned(ready: Any, task: str) -> None:
    assert list(ready(*SMALL[:-1], f"task={task}").notes) == []


def test_the_group_has_the_defaults_of_the_schema() -> None:
    """Otherwise settings that nobody has set would be reported as ignored."""
    given = load(Path(__file__).parents[2] / "conf/train/default.yaml")
    assert Train.model_validate(given) == Train()
