"""The own function and own module of the page on models: recorded, trained alone, saved, loaded by another run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from run_files import weights

from hookrun.report import write_report
from hookrun.store.reader import Run

PAGE = (Path(__file__).parents[3] / "hookrun/models/README.md").read_text(encoding="utf-8")
CODE, EXPERIMENT = re.findall(
    r"```python\n# mypkg/hooks\.py\n(.*?)```\n\n```yaml\n(.*?)```", PAGE, re.DOTALL
)[0]
SHORT = ("model=cnn", "compute.device=cpu", "train.epochs=2", "train.limit_batches=3", "train.log_every=1")
ADDED = [f"fc.adapted_{layer}_{name}" for layer in ("down", "up") for name in ("weight", "bias")]


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg/hooks.py").write_text(CODE)
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text("# @package _global_\n" + EXPERIMENT)
    monkeypatch.setenv("HOOKRUN_TRUST", "mypkg")
    yield
    for name in ("mypkg.hooks", "mypkg"):
        sys.modules.pop(name, None)


MINE = ("experiment=mine", "hydra.searchpath=[file://conf]", *SHORT)


@pytest.fixture
def found(shared: Callable[..., Run]) -> Run:
    """The run of the page's experiment."""
    return shared(*MINE)


def test_the_own_module_alone_is_trained(executed, found, capsys) -> None:
    capsys.readouterr()
    before = executed(*MINE, "train.optimizer.lr=0")
    told = capsys.readouterr().out
    assert "trains 4 of 10 parameters" in told
    assert "adapted: adds adapted_down_weight [4, 10]" in told
    assert [hook["code"]["function"]["function"] for hook in found.plan["hooks"]] == [
        "mypkg.hooks:spread", "mypkg.hooks:Adapter"
    ]  # fmt: skip
    moved = {name for name, each in weights(found).items() if not torch.equal(each, weights(before)[name])}
    assert moved == set(ADDED)
    lines = [line for line in found.stats if line["mode"] == "train"]
    assert [(line["step"], line["hook"]) for line in lines] == [(step, "seen") for step in range(6)]
    for line in lines:
        assert line["spread"] > 0
        assert line["input_norm"] > 0
    page = write_report(found.path).read_text()
    assert "spread" in page
    assert "input_norm" in page


def test_another_run_loads_it_unchanged(executed, found, refused) -> None:
    file = str(found.path / "checkpoints/last.safetensors")
    read = executed(*MINE, "task=evaluate", f"model.weights={file}")
    validated = [line["loss"] for line in found.metrics if line["split"] == "val"]
    assert read.metrics[-1]["loss"] == validated[-1]
    said = refused("model=cnn", "task=evaluate", f"model.weights={file}")
    assert "neither the model nor its hooks have" in said
    assert "adapted_down_weight" in said
    said = refused(*MINE, "task=export", f"model.weights={file}")
    assert "hooks.adapted: python on 'forward' runs your own Python" in said


def test_effects_record_the_pass_without_the_moved_hook_once(executed) -> None:
    hooks = [
        "+hooks.moved={select: [relu1, relu2], hook: forward, action: scale, factor: 0}",
        "+hooks.of_stats={select: relu1, hook: forward, action: stats, of: [min, max], priority: -1}",
    ]
    found = executed(
        *MINE, *hooks, "task=effects", "task.hook=moved", "task.over={module: each}", "task.metric=loss"
    )
    mine = [line for line in found.stats if line["hook"] == "seen"]
    theirs = [line for line in found.stats if line["hook"] == "of_stats"]
    assert [line["step"] for line in mine] == [0, 1, 2] == [line["step"] for line in theirs]
    for own, line in zip(mine, theirs, strict=True):
        assert own["spread"] == pytest.approx(line["max"] - line["min"])
