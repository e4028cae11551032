"""A task under its hooks as it sees the run: forwards, passes, metrics; what is written before and after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import hookrun
from hookrun.errors import HookrunError, SpecError
from hookrun.run.passes.batches import Batches
from hookrun.run.passes.compile_check import Compiled
from hookrun.run.passes.context import RunContext
from hookrun.run.passes.loggers import LoggedRun, RunLogger
from hookrun.run.passes.open_run import show_plan
from hookrun.run.passes.progress import Screen
from hookrun.run.passes.resuming import Resuming
from hookrun.run.ranks import Ranks
from hookrun.run.tasks import parse_experiment, prepare
from hookrun.store.run_dir import RunDir
from hookrun.store.states.files import SECONDS

STATS = {"select": "fc", "hook": "forward", "action": "stats", "of": ["mean"]}
Performed = Callable[..., str | None]


def one_batch(context: RunContext) -> None:
    context.forward(next(Batches(context.prepared, "val").epoch(0)))


def stored(path: Path, name: str) -> Any:
    return json.loads((path / "run" / name).read_text())


def test_the_plan_is_on_disk_before_the_task(performed, tmp_path) -> None:
    def perform(context: RunContext) -> None:
        assert stored(tmp_path, "plan.json")["hooks"][0]["name"] == "h"
        assert stored(tmp_path, "model.json")["class"] == "MLP"
        assert stored(tmp_path, "env.json")
        assert not (tmp_path / "run" / "hooks.json").exists()
        one_batch(context)

    assert performed(perform, hooks={"h": STATS}) is None
    (site,) = stored(tmp_path, "hooks.json")["sites"]
    assert site["hook"] == "h"
    assert site["fired"] == 1
    assert len((tmp_path / "run" / "stats.jsonl").read_text().splitlines()) == 1


def test_loggers_are_told_how_the_experiment_ended(performed, monkeypatch) -> None:
    told = list[Any]()

    class Telling(RunLogger):
        logger_name = package = "telling"

        def __init__(self, run: LoggedRun) -> None:
            told.append(json.loads(json.dumps(run.config)))

        def metrics(self, split: str, values: Mapping[str, float], step: int, of: Any = None) -> None:
            told.append((split, values, step, of))

        def close(self, *, failed: bool) -> None:
            told.append(failed)

    monkeypatch.setattr("hookrun.run.passes.loggers.loggers", lambda: {"telling": Telling})
    log = lambda context: context.log("val", {"loss": 0.5}, "epoch", lr=0.1)  # noqa: E731
    performed(log, loggers=("telling",), hooks={"h": STATS})
    config, *rest = told
    assert config["task"]["name"] == "evaluate"
    assert config["seed"] == 0
    assert config["hooks"]["h"]["action"] == "stats"
    assert rest == [("val", {"loss": 0.5, "lr": 0.1}, 0, "epoch"), False]
    with pytest.raises(ZeroDivisionError):
        performed(lambda context: 1 / 0, loggers=("telling",), path="failing")
    assert told[-1] is True


def test_values_of_added_parameters_come_from_the_file(performed, ready, tmp_path) -> None:
    bias = {"select": "fc", "hook": "forward", "action": "add_bias", "value": [0.0] * 10, "trainable": True}
    plain = ready("model=mlp")
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
        assert ("does not train them" in said) == (task == "evaluate")
        assert "weights: random" in said
        assert ("under ranks" in said) == (strategy == "ddp")
        assert ("trains all" in said) == (task == "train")


def lines(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    file = tmp_path / "run" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class NoBatches(list[Any]):
    split = "val"


def test_new_memory_is_filled_with_nan_in_the_first_batch_only(performed: Performed) -> None:
    """So that a model that reads memory it has not written shows it; later batches do not pay for that."""
    found = list[bool]()

    def perform(context: RunContext) -> None:
        context.model.register_forward_pre_hook(
            lambda module, args: found.append(bool(torch.empty(100).isnan().all()))
        )
        context.evaluate(Batches(context.prepared, "val"), "val", "validation")

    performed(perform, data={"batch_size": 150})
    assert found == [True, False, False]
    assert torch.utils.deterministic.fill_uninitialized_memory, "the setting of the process"


def test_a_failed_pass_leaves_the_model_as_it_was(performed, tmp_path) -> None:
    def perform(context: RunContext) -> None:
        clock = context.hooks.clock
        batches = Batches(context.prepared, "val")
        context.model.train()
        clock.step = 7
        with pytest.raises(ZeroDivisionError), context.evaluating(batches, "pass", {}) as (passed, _):
            for batch in passed:
                assert not context.model.training
                assert not torch.is_grad_enabled()
                context.forward(batch)
                clock.step += 1
                if clock.step == 2:
                    assert lines(tmp_path, "stats") == [], "they wait to be read together"
                    raise ZeroDivisionError
        assert (clock.step, context.model.training, torch.is_grad_enabled()) == (7, True, True)
        assert len(lines(tmp_path, "stats")) == 2
        empty = cast(Batches, NoBatches())
        with pytest.raises(HookrunError, match="the data has no samples in its val split"):
            context.evaluate(empty, "val", "validation")

    performed(perform, hooks={"h": STATS})


def test_output_without_hooks_leaves_the_other_alone(performed: Performed) -> None:
    """Dropout draws the same, buffers count one call, and the hook draws as in the first forward."""
    noise = {"select": "fc", "hook": "forward", "action": "noise", "std": 1.0}
    found = list[Any]()

    def perform(context: RunContext) -> None:
        context.model.register_buffer("calls", torch.zeros(()))

        def dropped(module: nn.Module, args: Any) -> Any:
            context.model.calls.add_(1)
            return F.dropout(args[0], 0.5)

        context.model.fc.register_forward_pre_hook(dropped)
        batch = next(Batches(context.prepared, "val").epoch(0))
        torch.manual_seed(0)
        found.append((context.forward(batch), context.model.calls.item(), context._others))

    for name in ("loss", "kl"):
        performed(perform, path=name, hooks={"h": noise}, task={"name": "evaluate", "metrics": [name]})
    (alone, count, nothing), (both, same, others) = found
    assert torch.equal(alone, both)
    assert count == same == 1
    assert nothing is None
    assert others is not None
    assert not torch.equal(others, both)
    assert not others.requires_grad


def test_every_so_many_steps_are_logged(performed: Performed) -> None:
    seen = list[tuple[bool, bool, bool]]()

    def perform(context: RunContext) -> None:
        clock = context.hooks.clock
        for number in range(3):
            with suppress(ZeroDivisionError), context.logged(number) as is_logged:
                within = clock.counting
                raise ZeroDivisionError
            seen.append((is_logged, within, clock.counting))

    performed(perform)
    assert seen == [(True, True, False), (False, False, False), (True, True, False)]


def test_a_summed_loss_counts_as_of_the_whole_batch() -> None:
    told = list[float]()
    for sums in (False, True):
        context = object.__new__(RunContext)
        context._others = "others"
        context.ranks = cast(Ranks, SimpleNamespace(several=True))
        context.prepared = cast(Any, SimpleNamespace(loss=SimpleNamespace(sums=sums)))
        context.measuring = cast(
            Any, SimpleNamespace(add=lambda average, loss, *rest: told.append(float(loss)))
        )
        batch = cast(Any, SimpleNamespace(whole=8, ids=range(2)))
        context.measure(cast(Any, None), torch.tensor(3.0), None, batch)
        assert context._others is None
    assert told == [3.0, 12.0]


def test_a_state_follows_the_rows_on_the_disk(performed, monkeypatch) -> None:
    due = list[bool]()
    shards = 0

    class Points(Resuming):
        seconds = 0.0  # type: ignore[assignment]

        def point(self, is_due: bool = False, **_: Any) -> bool:
            due.append(is_due)
            Points.seconds = SECONDS if len(due) == 3 else 0.0
            return is_due

    def perform(context: RunContext) -> None:
        nonlocal shards
        monkeypatch.setattr(context.resuming, "__class__", Points)
        monkeypatch.setattr(RunDir, "shards", property(lambda run_dir: shards))
        with context.evaluating(Batches(context.prepared, "val"), "evaluate", {}) as (batches, _):
            for number, _ in enumerate(batches):
                shards = 1 if number else 0

    performed(perform, train={"limit_batches": 6})
    assert due == [False, True, False, True, False, False]


def test_a_compiled_run_has_the_results_of_the_run(executed) -> None:
    hooks = (
        "+hooks.late={select: 'type:ReLU', hook: forward, action: clamp, max: 0.1, when: {step: {start: 1}}}",
        "+hooks.clip={select: '**', hook: grad, action: clamp, min: -0.01, max: 0.01}",
        "+hooks.seen={select: 'type:Linear', hook: forward, action: capture}",
    )
    argv = ("model=mlp", "data.batch_size=16", "train.limit_batches=2", "train.epochs=1", "strict=true")
    runs = [executed(*argv, *hooks, f"compute.compile={each}") for each in ("false", "true")]
    plain, compiled = (run.metrics for run in runs)
    for module, rows in runs[0].captures["seen"].items():
        found = runs[1].captures["seen"][module]
        assert torch.equal(found.sample_ids, rows.sample_ids)
        torch.testing.assert_close(found[:], rows[:], rtol=1e-3, atol=1e-4)
    assert len(plain) == len(compiled) > 1
    for expected, found in zip(plain, compiled, strict=True):
        for key in ("step", "loss", "accuracy"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3)


def test_hooks_that_do_not_compile_are_refused_early(refused, hook) -> None:
    said = refused("compute.compile=true", hook(select="fc", hook="forward", action="print"))
    assert "hooks.h: print on 'forward' passes values to Python at each firing" in said


@pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")  # the hook never fires: that is what is wrong
@pytest.mark.parametrize("wrong", ["output", "hook"])
def test_a_compiled_model_with_other_outputs_is_an_error(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch reused a graph without the hooks."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 3}}
    with hookrun.hooked(model, spec) as hooks:

        def bare(x: torch.Tensor) -> torch.Tensor:
            return model(x) * 2 if wrong == "output" else model[0].forward(x) * 3

        monkeypatch.setattr(hooks, "compile", lambda: bare)
        said = "differs by 1 of its norm" if wrong == "output" else "fires 0 times in the compiled model"
        with pytest.raises(hookrun.HookrunError, match=said):
            Compiled(hooks, model)(torch.ones(1, 2))


def test_the_comparison_has_no_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout())
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 3}}
    torch.manual_seed(0)
    expected = model(torch.ones(3, 2))
    state = torch.get_rng_state()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    model[0].reset_running_stats()
    torch.manual_seed(0)
    with hookrun.hooked(model, spec) as hooks:
        monkeypatch.setattr(hooks, "compile", lambda: model)
        found = Compiled(hooks, model)(torch.ones(3, 2))
        assert hooks.fired["h", "0"] == 1
    assert torch.equal(found, expected * 3)
    assert torch.equal(torch.get_rng_state(), state)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
