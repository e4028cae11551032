"""The run as tasks see it: forwards, metrics and passes that can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookrun.errors import HookrunError
from hookrun.ranks import Ranks
from hookrun.store.run_dir import RunDir
from hookrun.store.states.files import SECONDS
from hookrun.tasks.run.batches import Batches
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.resuming import Resuming

Performed = Callable[..., str | None]
STATS = {"select": "fc", "hook": "forward", "action": "stats", "of": ["mean"]}


def lines(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    file = tmp_path / "run" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class NoBatches(list[Any]):
    split = "val"


def test_a_pass_gives_the_mean_and_the_clock_and_mode_as_before(performed, tmp_path) -> None:
    """Two batches of 300 samples and one of what is left of 359; hooks count batches as steps."""

    def perform(context: RunContext) -> None:
        batches = Batches(context.prepared, "val")
        context.model.train()
        context.hooks.clock.step = 40
        found = context.evaluate(batches, "val", "validation")
        assert (context.hooks.clock.step, context.model.training, torch.is_grad_enabled()) == (40, True, True)
        with torch.no_grad(), context.hooks.paused():
            scores = [(context.model.eval()(batch.inputs), batch.target) for batch in batches.epoch(0)]
        output, target = (torch.cat(each) for each in zip(*scores, strict=True))
        assert len(scores) == 2 and len(scores[1][1]) == 59
        assert found["loss"] == pytest.approx(float(F.cross_entropy(output, target)), rel=1e-6)
        assert found["accuracy"] == pytest.approx(float((output.argmax(1) == target).float().mean()))
        context.conclude("val", found, "epoch")

    performed(perform, data={"batch_size": 300}, hooks={"h": STATS})
    assert [line["step"] for line in lines(tmp_path, "stats")] == [0, 1]
    (line,) = lines(tmp_path, "metrics")
    assert (line["split"], line["epoch"], line["step"], line["of"]) == ("val", 0, 40, "epoch")


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


def test_a_pass_that_fails_leaves_clock_mode_and_gradients_as_they_were(performed, tmp_path) -> None:
    def perform(context: RunContext) -> None:
        clock, batches = context.hooks.clock, Batches(context.prepared, "val")
        context.model.train()
        clock.step = 7
        with pytest.raises(ZeroDivisionError), context.evaluating(batches, "pass", {}) as (passed, _):
            for batch in passed:
                assert not context.model.training and not torch.is_grad_enabled()
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


def test_a_check_that_stops_ends_the_pass_after_its_batch(performed: Performed) -> None:
    stops = {
        "select": "fc",
        "hook": "forward",
        "action": "check",
        "max": -1e9,
        "policy": "stop",
        "when": {"step": [1]},
    }
    seen = list[int]()

    def perform(context: RunContext) -> None:
        with context.evaluating(Batches(context.prepared, "val"), "pass") as (passed, _):
            for batch in passed:
                context.forward(batch)
                seen.append(int(batch.ids[0]))
                assert context.stopped == (len(seen) == 2)
                context.hooks.step()

    assert "hook 'h' on fc" in str(performed(perform, hooks={"h": stops}))
    assert seen == [0, 4]


def test_the_output_without_hooks_changes_nothing_of_the_output_with_them(performed: Performed) -> None:
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
    assert torch.equal(alone, both) and count == same == 1 and nothing is None
    assert others is not None and not torch.equal(others, both) and not others.requires_grad


def test_every_so_many_steps_are_logged_and_counted_until_the_block_ends(performed: Performed) -> None:
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


def test_a_loss_that_is_a_sum_counts_on_a_rank_as_if_it_had_the_whole_batch() -> None:
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


def test_a_state_follows_the_rows_that_are_on_the_disk_and_the_time(performed, monkeypatch) -> None:
    due, shards = list[bool](), 0

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
