"""Where records and captured values go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hookrun.engine.actions.base import Keeper, Measured
from hookrun.engine.actions.check import LastPassed
from hookrun.errors import HookError


class Sink:
    """Where records and captured values go; this one drops them.

    There is one for the run directory, one for memory and one for trial runs. Each `site` is a `HookSite`.

    wants_calls: it needs the number of each module call within the forward pass
    counts_calls: it needs that number for records only: firings are counted, which costs less than following each call
    muted:       records are ignored for now
    has_values:  tensors hold real values, which may be read; False in a trial run
    stores_rows: it stores captures by sample
    stop:        why a check with policy `stop` asks for the end of the run, or None
    last_good:   where each check passed last; only if it `has_values`
    split:       the split of the current batch; None: not known
    counted:     [B], row numbers for a batch whose sample ids are not known; None: they are not numbered
    """

    wants_calls = False
    counts_calls = False
    muted = False
    has_values = True
    stores_rows = False
    stop: str | None = None
    last_good: LastPassed
    split: str | None = None
    counted: Tensor | None = None

    def keeper(self, site: Any) -> Keeper:
        """A function that stores the values that the site captures."""
        return lambda value, rows=None, tokens=None: None

    def emit(self, start: tuple[Any, ...], data: Mapping[str, Any] | Measured, *, show: bool = False) -> None:
        """Take a record, whose tensors may be read later. `show`: print it at once.

        start: the values of RECORD_KEYS, with which the record begins
        """

    def emit_together(self, numbers: Tensor, policy: str, judge: Callable[[Mapping[str, Any]], Any]) -> None:
        """Take the numbers of several firings, of which `judge` makes records when they are read; not while `muted`.

        policy: `error` if one of them is of a check with this policy
        """

    def settle(self) -> None:
        """Read the tensors of pending records."""

    def raise_failed(self) -> None:
        """At the end of a step: raise CheckFailed if a rule over steps with the policy `error` is broken."""

    def fail(self, site: Any, what: str) -> None:
        """A site cannot do what its hook asks for: raises HookError that names both; a trial run notes it."""
        raise HookError(f"{site.where}: {what}")

    def note(self, site: Any, text: str, held: tuple[int, int] | None = None) -> None:
        """What a plan says of a site, as a trial run shows it; of a fold the units and the bytes that it holds."""

    def guard(self, site: Any, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op of a site, whose exceptions end the run; in a trial run a version that notes them."""
        return op

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
