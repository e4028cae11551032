"""A task under its hooks: what is written before it and after it, however it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hookrun.errors import SpecError
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.loggers import LoggedRun, RunLogger
from hookrun.tasks.run.batches import Batches
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.execute import show_plan
from hookrun.tasks.run.progress import Screen

STATS = {"select": "fc", "hook": "forward", "action": "stats", "of": ["mean"]}
STOPS = {"select": "fc", "hook": "forward", "action": "check", "max": -1e9, "policy": "stop"}
Performed = Callable[..., str | None]


def one_batch(context: RunContext) -> None:
    context.forward(next(Batches(context.prepared, "val").epoch(0)))


def stored(path: Path, name: str) -> Any:
    return json.loads((path / "run" / name).read_text())


def test_the_plan_is_on_disk_before_the_task_and_counts_after_it(performed, tmp_path) -> None:
    def perform(context: RunContext) -> None:
        assert stored(tmp_path, "plan.json")["hooks"][0]["name"] == "h"
        assert stored(tmp_path, "model.json")["class"] == "MLP" and stored(tmp_path, "env.json")
        assert not (tmp_path / "run" / "hooks.json").exists()
        one_batch(context)

    assert performed(perform, hooks={"h": STATS}) is None
    (site,) = stored(tmp_path, "hooks.json")["sites"]
    assert (site["hook"], site["fired"]) == ("h", 1)
    assert len((tmp_path / "run" / "stats.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failure_leaves_records_and_no_hooks(performed, tmp_path, error: type[BaseException]) -> None:
    models = list[nn.Module]()

    def perform(context: RunContext) -> None:
        models.append(context.model)
        one_batch(context)
        raise error

    with pytest.raises(error):
        performed(perform, hooks={"h": STATS})
    assert len((tmp_path / "run" / "stats.jsonl").read_text().splitlines()) == 1, "they may explain it"
    assert stored(tmp_path, "hooks.json")["sites"][0]["fired"] == 1
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in models[0].modules())


def test_loggers_get_the_experiment_as_plain_values_and_are_told_how_it_ended(performed, monkeypatch) -> None:
    told = list[Any]()

    class Telling(RunLogger):
        logger_name = package = "telling"

        def __init__(self, run: LoggedRun) -> None:
            told.append(json.loads(json.dumps(run.config)))

        def metrics(self, split: str, values: Mapping[str, float], step: int, of: Any = None) -> None:
            told.append((split, values, step, of))

        def close(self, *, failed: bool) -> None:
            told.append(failed)

    monkeypatch.setattr("hookrun.tasks.loggers.loggers", lambda: {"telling": Telling})
    performed(
        lambda context: context.log("val", {"loss": 0.5}, "epoch", lr=0.1),
        loggers=("telling",),
        hooks={"h": STATS},
    )
    config, *rest = told
    assert (
        config["task"]["name"] == "evaluate"
        and config["hooks"]["h"]["action"] == "stats"
        and config["seed"] == 0
    )
    assert rest == [("val", {"loss": 0.5, "lr": 0.1}, 0, "epoch"), False]
    with pytest.raises(ZeroDivisionError):
        performed(lambda context: 1 / 0, loggers=("telling",), path="failing")
    assert told[-1] is True


def test_values_of_added_parameters_come_from_the_file(performed, tmp_path) -> None:
    bias = {"select": "fc", "hook": "forward", "action": "add_bias", "value": [0.0] * 10, "trainable": True}
    plain = prepare(
        parse_experiment({"task": {"name": "evaluate"}, "model": {"name": "mlp"}, "data": {"name": "digits"}})
    )
    found = list[float]()

    def perform(context: RunContext) -> None:
        found.extend(context.model.get_parameter("fc.b_bias").tolist())

    for name, values, refused in (
        ("right", torch.arange(10.0), ""),
        ("short", torch.arange(3.0), r"fc.b_bias has shape \[3\] .* its hook adds \[10\]"),
        ("whole", torch.arange(10), "fc.b_bias is int64 in the file and float32 in the model"),
    ):
        file = tmp_path / f"{name}.safetensors"
        save_file({**plain.model.state_dict(), "fc.b_bias": values}, file)
        about = {"path": name, "model": {"name": "mlp", "weights": str(file)}, "hooks": {"b": bias}}
        if refused:
            with pytest.raises(SpecError, match=refused):
                performed(perform, **about)
        else:
            performed(perform, **about)
    assert found == list(range(10))


def test_the_plan_is_shown_with_where_the_weights_come_from(capsys: Any) -> None:
    plain = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "hooks": {"h": STATS}}
    for task, strategy in (("evaluate", "ddp"), ("train", "none")):
        prepared = prepare(
            parse_experiment({**plain, "task": {"name": task}, "compute": {"strategy": strategy}})
        )
        show_plan(prepared, Screen())
        said = capsys.readouterr().out
        assert ("does not train them" in said) == (task == "evaluate") and "weights: random" in said
        assert ("under ranks" in said) == (strategy == "ddp") and ("trains all" in said) == (task == "train")
