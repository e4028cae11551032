"""What a run will do is told before it: sources of weights, settings and hooks without effect, the plan, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hookrun.cli import main
from hookrun.models import origin
from hookrun.models.settings import Model
from hookrun.report import write_report
from hookrun.store.config.yaml_files import load

SMALL = ["model=mlp", "compute.device=cpu", "compute.threads=1", "train.limit_batches=1", "train.epochs=1"]


def test_the_report_shows_where_weights_come_from(run, executed, capsys) -> None:
    trained = executed(*SMALL)
    assert "<dt>weights</dt><dd>random</dd>" in _joined(trained.path)
    Path("newest").symlink_to(trained.path)
    typed = "model.weights=newest/checkpoints/last.safetensors"
    capsys.readouterr()
    other = run(*SMALL[2:], "model=mlp", "task=evaluate", typed)
    meant = trained.path / "checkpoints/last.safetensors"
    page = _joined(other.path)
    assert f"weights: {meant}" in capsys.readouterr().out
    assert load(other.path / ".hydra/config.yaml")["model"]["weights"] == str(meant)
    assert f"<dt>weights</dt><dd>{meant}</dd>" in page
    assert f"model.weights={meant}" in page
    assert typed not in page


def _joined(run: Path) -> str:
    """The page of a run in one line."""
    return "".join(line.strip() for line in write_report(run).read_text(encoding="utf-8").splitlines())


def test_every_kind_of_weights_has_a_description() -> None:
    assert origin(Model(name="cnn")) == "random"
    assert origin(Model(name="resnet18", weights="IMAGENET1K_V1")) == "IMAGENET1K_V1"
    assert origin(Model(name="python", factory="mine.models:build")) == "as mine.models:build makes them"
    backbone = Model(name="fcn_resnet50", args={"weights_backbone": "IMAGENET1K_V1"})
    assert origin(backbone) == "random, with those of the backbone from IMAGENET1K_V1"


@pytest.mark.parametrize(("task", "overrides", "unused"), [
    ("predict", [], "train.epochs is"),
    ("evaluate", ["train.optimizer.lr=1", "train.shuffle=false", "train.loss=output_sum"],
     "train.epochs, train.optimizer, train.shuffle are"),
    ("predict", ["train.loss=output", "train.epochs=10"], "train.loss is"),
    ("export", ["compute.precision=bf16", "train.epochs=10"], "compute.precision is"),
])  # fmt: skip
def test_a_setting_without_effect_is_reported(task: str, overrides: list[str], unused: str, ready) -> None:
    notes = ready(*SMALL, f"task={task}", *overrides).notes
    assert [note for note in notes if "not used by" in note] == [f"{unused} not used by task={task}"]


def test_an_analysis_reports_that_it_uses_no_hooks(executed: Any, capsys: Any) -> None:
    capture = "+hooks.h={select: [layers.1, fc], hook: forward, action: capture}"
    captured = executed("model=mlp", "task=predict", "train.limit_batches=1", capture)
    capsys.readouterr()
    executed("task=similarity", f"task.run={captured.path}", capture)
    unused = "NOTE: compute.device, compute.threads, hooks are not used"
    assert f"{unused} by task=similarity" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["predict", "evaluate", "export"])
def test_settings_with_default_values_are_not_mentioned(ready: Any, task: str) -> None:
    assert list(ready(*SMALL[:-1], f"task={task}").notes) == []


GRADIENT = "+hooks.g={select: fc, hook: output_grad, action: capture}"


def test_a_gradient_hook_in_a_task_without_a_backward_pass(executed, refused, capsys: Any) -> None:
    executed(*SMALL, "task=predict", GRADIENT)
    out = capsys.readouterr().out
    assert "NOTE: g: output_grad needs a backward pass, which task=predict does not run" in out
    assert "g: captures" not in out, "no bytes are promised"
    assert out.index("NOTE: g") < out.index("never fired"), "before the run"
    said = refused(*SMALL, "task=predict", GRADIENT, "strict=true")
    assert "hooks.g.hook: output_grad needs a backward pass" in said


def test_task_plan_shows_the_whole_plan(capsys: Any) -> None:
    hook = "+hooks.all={select: '**', hook: forward, action: print}"
    assert main(["model=resnet18", "data=fake_images", "task=plan", hook]) == 0
    out = capsys.readouterr().out
    assert "layer4.1.bn2" in out
    assert "more" not in out


def test_apply_hooks_do_not_overwrite_their_checkpoint(executed: Any) -> None:
    ones = "+hooks.ones={select: fc, hook: apply, action: fill, value: 1}"
    run = executed(*SMALL, ones, "train.optimizer.lr=0.1")
    weights = run.path / "checkpoints" / "last.safetensors"
    trained = load_file(weights)["fc.weight"]
    assert not torch.equal(trained, torch.ones_like(trained))
    seen = "+hooks.seen={select: fc, hook: forward, action: linear, bias: null}"
    predict = ("task=predict", seen, f"model.weights={weights}", "train.limit_batches=2")
    first = executed(*SMALL[:3], *predict, ones).predictions[:]
    second = executed(*SMALL[:3], *predict, ones.replace("value: 1", "value: 2")).predictions[:]
    assert not torch.allclose(first, first[:, :1].expand_as(first)), "trained weights: classes differ"
    assert torch.allclose(second, second[:, :1].expand_as(first)), "another hook fills: classes are equal"


@pytest.mark.parametrize("sweep", [(), ("-m",)], ids=["run", "sweep"])
def test_the_plan_is_that_of_the_experiment_s_task(sweep: tuple[str, ...], capsys) -> None:
    assert main([*sweep, "experiment=capture_features", "task=plan"]) == 0
    assert "2.96 MB per run of 359 samples" in capsys.readouterr().out  # of task=predict, not of training
    assert main([*sweep, "experiment=capture_features", "task=plan", "train.limit_batches=1"]) == 0
    assert "per run of 64 samples" in capsys.readouterr().out


def test_mistakes_in_the_task_s_own_keys_are_found_by_the_plan(executed) -> None:
    hook = "+hooks.h={select: fc, hook: forward, action: %s}"
    source = executed("task=predict", hook % "capture")
    value = f"{{run: '{source.path}', capture: h, module: fc, sample: same}}"
    entry = hook % f"replace, value: {value}"
    Path("conf/experiment").mkdir(parents=True)
    for task, code in (("predict", 0), ("train", 2)):
        header = f"# @package _global_\ndefaults: [{{override /task: {task}}}]\n"
        Path("conf/experiment/mine.yaml").write_text(header)
        assert main(["--config-dir", "conf", "experiment=mine", "task=plan", entry]) == code


@pytest.mark.usefixtures("no_data_is_read")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.optimizer.name=Adamm"], "did you mean 'Adam"),
        (["+hooks.h={select: fcc, hook: forward, action: print}"], "did you mean 'fc'"),
        (["train.optimizer.name=x", "compute.device=y", "model.name=z"], "3 configuration errors"),
    ],
)
def test_mistakes_are_told_before_any_data_is_read(refused, overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


def test_a_missing_package_line_is_reported(refused, tmp_path) -> None:
    folder = tmp_path / "conf/experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("hooks:\n  a: {select: fc, hook: grad, action: print}\n")
    assert "# @package _global_" in refused("--config-dir", "conf", "experiment=mine")
