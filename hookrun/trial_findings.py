"""The results of a trial run of a hooked copy: hooks that fail, and the shapes of captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hookrun.actions.base import Keeper, Packed
from hookrun.actions.own_code import OwnCodeError, only_without_data
from hookrun.actions.rows import TokenRows
from hookrun.containers import children, reshaped
from hookrun.errors import HookrunError
from hookrun.runtime.site import HookSite, Sink
from hookrun.runtime.snapshot import held


class TrialSink(Sink):
    """The sink of a trial run: collects failures of hooks and the tensors of captures.

    problems: (hook, path, what) of every hook that failed
    captured: (hook, path) -> the fake tensors of its first capture
    without:  (hook, path) -> why the user's own function cannot run without data; its value passed unchanged
    """

    has_values = False

    def __init__(self) -> None:
        self.problems = list[tuple[str, str, str]]()
        self.captured = dict[tuple[str, str], list[Tensor]]()
        self.without = dict[tuple[str, str], str]()

    def keeper(self, site: HookSite) -> Keeper:
        """Remember the tensors of the first firing."""

        def keep(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            # Detached: the graph of a tensor refers to its hooks, and they to this object: a cycle hidden from gc.
            seen = [tensor.detach() for tensor in held(value)]
            self.captured.setdefault((site.hook_name, site.path), seen)

        return keep

    def emit(self, start: tuple[Any, ...], data: Mapping[str, Any], *, show: bool = False) -> None:
        """Record nothing, since the values are not real; statistics are computed: what fails there is a problem."""
        dict(data)

    def guard(self, site: HookSite, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The op, wrapped: if it fails, the failure becomes a problem and the value passes unchanged."""

        def guarded(value: Any) -> Any:
            try:
                new = op(value)
            except HookrunError as error:
                own = error.__cause__
                if isinstance(own, OwnCodeError) and (why := only_without_data(own)) is not None:
                    self.without[site.hook_name, site.path] = why
                    return value
                self.fail(site, str(error).removeprefix(f"{site.where}: "))
                return value
            if (changed := _changed_form(value, new)) is not None:
                self.fail(site, changed)
                return value
            return new

        return guarded

    def fail(self, site: HookSite, what: str) -> None:
        """Add the failure of a hook at a site, each different failure once."""
        if (found := (site.hook_name, site.path, what)) not in self.problems:
            self.problems.append(found)


def _changed_form(old: Any, new: Any) -> str | None:
    """How an edit changed type, shape, dtype or device, or None."""
    if old is new or isinstance(new, Packed):  # a saved tensor may be replaced, it is restored later
        return None
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return reshaped(old, new)
    if type(old) is not type(new):
        return f"the action changes the type from {type(old).__name__} to {type(new).__name__}"
    before, after = children(old), children(new)
    if [key for key, _ in before] != [key for key, _ in after]:
        return f"the action changes the members of the {type(old).__name__}"
    pairs = zip(before, after, strict=True)
    return next((text for (_, a), (_, b) in pairs if (text := _changed_form(a, b)) is not None), None)
