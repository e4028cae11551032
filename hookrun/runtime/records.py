"""The sinks of records and captured values: their base class, and `Memory` for the Python API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.base import ABOUT, Keeper
from hookrun.actions.check import verdict
from hookrun.actions.rows import TokenRows
from hookrun.actions.stats import Measured
from hookrun.containers import readable
from hookrun.errors import HookError, reason
from hookrun.plan.texts import decoder_of
from hookrun.runtime.captured_rows import CapturedRows
from hookrun.runtime.fast.copies import held_bytes
from hookrun.runtime.fast.kept_in_memory import KeptInMemory
from hookrun.runtime.fast.small_tensors import SmallTensors, Waiting
from hookrun.runtime.last_good import Judged, LastGood
from hookrun.runtime.site import PlacedHook
from hookrun.runtime.snapshot import copied, held, in_reach, snapshot


@dataclass(slots=True)
class Budget:
    """The bytes that a hook may keep, all its modules together.

    spent: a value did not fit, and nothing is kept any more
    """

    limit: int
    used: int = 0
    spent: bool = False

    def takes(self, size: int) -> bool:
        """Whether `size` more bytes fit; if so they are counted as used."""
        fits = self.used + size <= self.limit
        self.used += size if fits else 0
        return fits


def spent_line(site: PlacedHook, budget: Budget) -> str:
    """The message for a hook that has used up its `max_bytes`."""
    used, clock = f"{budget.used:,} of {budget.limit:,} bytes", site.clock
    at = f"epoch {clock.epoch}, step {clock.step}"
    return f"{site.hook_name}: its max_bytes are used up ({used}) at {at}: it captures nothing more"


def batch_rows(site: PlacedHook, value: Any, rows: Tensor | None) -> int | None:
    """How many rows of the batch the value has; None if its first dimension is not the batch dimension.

    rows: the places of the value's rows in the batch; None: 0, 1, 2, …
    """
    found = list(held(value))
    lengths = {len(x) if x.dim() and x.layout is torch.strided and not x.is_nested else 0 for x in found}
    count = lengths.pop() if len(lengths) == 1 else 0
    samples = site.clock.samples if rows is None else rows
    if not count or not site.hook_type.batch or (samples is not None and len(samples) != count):
        return None
    return count


def first_rows(value: Any, rows: Tensor | None, count: int) -> tuple[Any, Tensor]:
    """The first `count` rows of a value, and their places in the batch.

    rows: the places of all rows of the value; None: 0, 1, 2, …
    """
    part = copied(value, lambda tensor: tensor.detach()[:count])
    return part, torch.arange(count, device="cpu") if rows is None else rows[:count]


class RecordSink(ABC):
    """Collects records and reads their tensors together later, so that a hook never waits for the device.

    stop:  why a check with policy `stop` asks for the end of the run, or None
    muted: records are ignored for now
    """

    wants_calls = False
    has_values = True

    def __init__(self) -> None:
        self.stop: str | None = None
        self._last_good = LastGood()
        self.muted = False
        self._pending = list[dict[str, Any] | Waiting]()
        self._statistics = SmallTensors()
        self._budgets = dict[str, Budget]()

    def within_budget(self, site: PlacedHook, keep: Keeper) -> Keeper:
        """`keep` until the hook's `max_bytes` are used up; of the value that does not fit, the rows that still do."""
        limit = site.spec.action.budget()
        if limit is None:
            return keep
        budget = self._budgets.setdefault(site.hook_name, Budget(limit))

        def limited(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            if budget.spent or (value := in_reach(value)) is None:
                return
            if budget.takes(self.size(value)):
                keep(value, rows, tokens)
                return
            budget.spent = True
            if (part := self._first_rows(site, value, rows, budget)) is not None:
                some, places = part
                keep(some, places, None if tokens is None else tokens.at(torch.arange(len(places))))
            self.show(spent_line(site, budget))
            site.emit({"spent": limit})

        return limited

    def size(self, value: Any) -> int:
        """The bytes that a captured value takes: those of all its tensors, as on disk."""
        return sum(tensor.numel() * tensor.element_size() for tensor in held(value))

    def _first_rows(
        self, site: PlacedHook, value: Any, rows: Tensor | None, budget: Budget
    ) -> tuple[Any, Tensor] | None:
        """As many rows of a batch as still fit, with their places in it; None if not a single one fits."""
        count = batch_rows(site, value, rows)
        if count is None:
            return None
        row = self.size(value) // count
        fitting = min((budget.limit - budget.used) // max(row, 1), count)
        if not fitting:
            return None
        budget.takes(row * fitting)
        return first_rows(value, rows, fitting)

    def guard(self, site: PlacedHook, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op itself: its exceptions end the run."""
        return op

    def emit(self, record: dict[str, Any], *, show: bool = False) -> None:
        """Take a record; `show`: print it at once.

        Tensors that `torch.func` has wrapped are unwrapped. Records of a model that is being traced are ignored, since
        their tensors have no values. Raises HookError for a meta tensor.
        """
        if self.muted:
            return
        for key, value in record.items():
            if isinstance(value, Tensor):
                if (found := readable(value)) is None:
                    if value.is_meta:
                        raise HookError(f"{_place(record)}: a meta tensor has no values to record")
                    return
                if found is not value:
                    record = record | {key: found}
        if show:
            record = read(record)
            self.show(line(record))
        self._pending.append(record)
        if len(self._pending) > MOST_PENDING:
            self.settle()

    def measure(self, start: tuple[Any, ...], data: Measured) -> bool:
        """Take a record whose statistics are computed at once or by `settle`. False: the caller has to emit it."""
        if self.muted:
            return True
        waiting = self._statistics.add(data.x, data.of, start)
        if waiting is None:
            return False
        self._pending.append(waiting)
        if len(self._pending) > MOST_PENDING:
            self.settle()
        return True

    def fail(self, site: PlacedHook, what: str) -> None:
        """Raise HookError that names hook and module."""
        raise HookError(f"{site.where}: {what}")

    def settle(self) -> None:
        """Read the tensors of the pending records and store them; checks that passed are not stored.

        Raises HookError for a record that cannot be read; the records after it stay pending.
        """
        pending = self._pending[:]
        del self._pending[: len(pending)]  # the list itself must stay: hooks append to it
        self._statistics.measure()
        store = self.store
        for number, record in enumerate(pending):
            try:
                if isinstance(record, list):
                    store(record[0])
                else:
                    self._settle(record)
            except BaseException:
                self._pending[:0] = pending[number + 1 :]
                raise

    def _settle(self, record: dict[str, Any]) -> None:
        is_good = record.get("ok")
        if is_good is not None:
            when = (record["mode"], record["epoch"], record["step"])
            judged = Judged(record["module"], record.get("class", ""), record["path"], record["call"], when)
            if is_good:
                self._last_good.passed(record["hook"], judged)
                return
            if "last_good" not in record:
                record = {**record, "last_good": self._last_good.before(record["hook"], judged)}
        try:
            plain = read(record)
        except RuntimeError as error:  # for a kind of tensor that torch cannot convert
            raise HookError(f"{_place(record)}: what it recorded cannot be read: {reason(error)}") from error
        self.store(plain)
        if plain.get("policy") == "stop" and self.stop is None:
            self.stop = f"{_place(plain)}: {verdict(plain)}"

    def state_dict(self) -> dict[str, Any]:
        """The stop message and the budgets. Pending records are read and stored first."""
        self.settle()
        budgets = {hook: {"used": each.used, "spent": each.spent} for hook, each in self._budgets.items()}
        return {"stop": self.stop, "budgets": budgets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Records that are pending from installing the hooks again are dropped."""
        self._pending.clear()
        self.stop = state["stop"]
        for hook, before in state["budgets"].items():
            if (budget := self._budgets.get(hook)) is not None:
                budget.used, budget.spent = before["used"], before["spent"]

    def show(self, text: str) -> None:
        """Print the line of a `print` action."""
        print(text)

    @abstractmethod
    def store(self, record: dict[str, Any]) -> None:
        """Keep a record that has been read."""


class Memory(RecordSink):
    """Keeps captures and records for as long as the installation is referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = dict[str, dict[str, list[Any]]]()
        self._records = list[dict[str, Any]]()

    def keeper(self, site: PlacedHook) -> Keeper:
        """A function that appends to the live list of the site's module."""
        of_hook = self.captures.setdefault(site.hook_name, {})
        if site.spec.keys.tokens is not None:
            return self.within_budget(site, self._keeper_of_rows(site, of_hook))
        return self.within_budget(site, KeptInMemory(of_hook.setdefault(site.path, [])))

    def _keeper_of_rows(self, site: PlacedHook, of_hook: dict[str, list[Any]]) -> Keeper:
        """A function that appends rows chosen by `tokens`, together with the tokens they belong to."""
        entries = of_hook[site.path] = CapturedRows(find_decoder=partial(decoder_of, site.tokenizer))

        def keep(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            if (value := in_reach(value)) is not None and tokens is not None:
                with torch._C._DisableFuncTorch():
                    entries.append(snapshot(value))
                    entries.note(tokens)

        return keep

    def size(self, value: Any) -> int:
        """The bytes that a copy of the value holds; a tensor that occurs twice counts once."""
        return sum(held_bytes(tensor) for tensor in {id(tensor): tensor for tensor in held(value)}.values())

    def store(self, record: dict[str, Any]) -> None:
        """Append a record whose tensors have been read."""
        self._records.append(record)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far, in order, with their tensors read."""
        self.settle()
        return self._records


MOST_PENDING = 4096
"""More pending records than this are read at once, so that a long loop does not hold all their tensors."""


def read(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its tensors as Python numbers and lists."""
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in record.items()}


def _place(record: dict[str, Any]) -> str:
    cls = f" ({record['class']})" if record.get("class") else ""
    return f"hook {record['hook']!r} on {record['module'] or '(root)'}{cls}"


def line(record: dict[str, Any]) -> str:
    """A record as one line of text: ``shapes  layer4  shape=[10, 512, 1, 1]``."""
    at = f" {record['path']}" if record["path"] else ""
    data = "  ".join(f"{key}={_short(value)}" for key, value in record.items() if key not in ABOUT)
    return f"{record['hook']}  {record['module'] or '(root)'}{at}  {data}"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
