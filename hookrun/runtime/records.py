"""Where records and captured values go: into memory, for the Python API; base of the sink that writes to disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.base import RECORD_KEYS, Keeper
from hookrun.actions.check import verdict
from hookrun.containers import snapshot, snapshot_of_tensor, tensors
from hookrun.errors import HookError
from hookrun.runtime.site import PlacedHook

_lazy_clone = torch._lazy_clone
DECIDED = torch.empty(0)
"""Stands for a first captured value that is no longer needed."""


@dataclass(slots=True)
class Budget:
    """The bytes that a hook may keep at all its modules together."""

    limit: int
    used: int = 0
    spent: bool = False

    def takes(self, size: int) -> bool:
        """Whether so many more fit; once they do not, nothing does."""
        self.spent = self.spent or self.used + size > self.limit
        if not self.spent:
            self.used += size
        return not self.spent


class RecordSink(ABC):
    """Holds records back until their tensors are read in one go, so that a hook never waits for the device.

    stop: why a check with policy `stop` asks for the end of the run, or None
    """

    wants_calls = False
    has_values = True

    def __init__(self) -> None:
        self.stop: str | None = None
        self._pending = list[dict[str, Any]]()
        self._budgets = dict[str, Budget]()

    def within_budget(self, site: PlacedHook, keep: Keeper) -> Keeper:
        """`keep`, as long as the hook's `max_bytes` last."""
        limit = site.spec.action.budget()
        if limit is None:
            return keep
        budget, clock = self._budgets.setdefault(site.hook_name, Budget(limit)), site.clock

        def limited(value: Any, rows: Tensor | None = None) -> None:
            if budget.spent:
                return
            if budget.takes(sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))):
                keep(value, rows)
                return
            used, at = f"{budget.used:,} of {limit:,} bytes", f"epoch {clock.epoch}, step {clock.step}"
            self.show(
                f"{site.hook_name}: its max_bytes are used up ({used}) at {at}: it captures nothing more"
            )
            site.emit({"spent": limit})

        return limited

    def guard(self, site: PlacedHook, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op: its failure ends the run."""
        return op

    def emit(self, record: dict[str, Any], *, show: bool = False) -> None:
        """Take a record; `show`: print it at once."""
        if show:
            record = read(record)
            self.show(line(record))
        self._pending.append(record)
        if len(self._pending) > MOST_PENDING:
            self.settle()

    def fail(self, site: PlacedHook, what: str) -> None:
        """Raise HookError, with hook and module."""
        raise HookError(f"{site.where}: {what}")

    def settle(self) -> None:
        """Read the tensors of the pending records; a check that passed leaves none."""
        pending, self._pending = self._pending, []
        for record in pending:
            if record.get("ok"):
                continue
            record = read(record)
            self.store(record)
            if record.get("policy") == "stop" and self.stop is None:
                self.stop = f"hook {record['hook']!r} on {record['module'] or '(root)'}: {verdict(record)}"

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
        """Append to the live list of the site's module.

        Both ways to copy are right, whatever happens to the value. Copy-on-write costs next to nothing where nothing
        is written, and more than a clone where it is (its copy runs on one thread): the first firing decides.
        """
        append = self.captures.setdefault(site.hook_name, {}).setdefault(site.path, []).append
        copy, first, version = _lazy_clone, None, 0

        def keep(value: Any, rows: Tensor | None = None) -> None:
            nonlocal copy, first, version
            if type(value) is not Tensor:
                append(snapshot(value))
                return
            if value.requires_grad:
                value = value.detach()
            if first is not DECIDED:
                if first is None and not value.is_inference():  # which keep no version
                    first, version = value, value._version
                else:
                    copy = torch.clone if first is not None and first._version != version else _lazy_clone
                    first = DECIDED
            try:
                append(copy(value))
            except RuntimeError:
                append(snapshot_of_tensor(value))

        return self.within_budget(site, keep)

    def store(self, record: dict[str, Any]) -> None:
        """Keep a record."""
        self._records.append(record)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every record so far, in order, with its tensors read."""
        self.settle()
        return self._records


MOST_PENDING = 4096
"""Records wait for their tensors to be read up to this number, so that a long loop does not hold them all."""


def read(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its tensors as Python numbers and lists."""
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in record.items()}


def line(record: dict[str, Any]) -> str:
    """A record as one line for people: ``shapes  layer4  shape=[10, 512, 1, 1]``."""
    at = f" {record['path']}" if record["path"] else ""
    data = "  ".join(f"{key}={_short(value)}" for key, value in record.items() if key not in RECORD_KEYS)
    return f"{record['hook']}  {record['module'] or '(root)'}{at}  {data}"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
