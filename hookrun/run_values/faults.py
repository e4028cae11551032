"""The faults that another run has listed, for one module of a hook that repeats them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hookrun.actions.values import RunFaults
from hookrun.errors import HookrunError, listed
from hookrun.run_values.runs import PendingRun, RunReferences, require_same_model
from hookrun.spec import HookSpec
from hookrun.store.format import encode

Lines = Sequence[Mapping[str, Any]]
_SHOWN = 4


class FaultList:
    """The faults of a hook at one module.

    lines: of faults.jsonl, in order
    fired: how often the hook fired there
    name:  of the hook and its run, for messages
    """

    def __init__(self, lines: Lines, fired: int, name: str) -> None:
        self.count, self.fired, self._name = len(lines), fired, name
        self._by_draw = defaultdict[tuple[int, ...], list[Mapping[str, Any]]](list)
        for line in lines:
            self._by_draw[tuple(line["draw"])].append(line)
        self.digest = hashlib.sha256(encode([fired, *lines]).encode()).hexdigest()

    def at(self, draw: tuple[int, ...], firing: int) -> Lines:
        """The faults of a draw in a firing, counted from 1. ValueError if there were not so many firings."""
        if firing > self.fired:
            raise ValueError(
                f"faults: {self._name} fired {self.fired:,} times there, and this is once more: repeat a run of the "
                "same length, with the same `when`"
            )
        return self._by_draw.get(draw, ())


def read_faults(
    value: RunFaults, spec: HookSpec, places: Mapping[str, tuple[str, ...]], runs: RunReferences
) -> Mapping[str, FaultList | PendingRun]:
    """Path -> the faults there.

    spec:   the hook that repeats them
    places: path of a module or parameter -> all its names

    HookrunError if the run is of another model or has no such hook, or if the hook was on other modules.
    """
    run, name = runs.open(value.run), spec.name
    if run is None:
        return dict.fromkeys(places, PendingRun(value.run))
    named = f"{name} of the run {run.path}"
    if runs.settings is not None:
        require_same_model(run, named, runs.settings)
    hooks = {
        hook["name"]: f"{hook.get('action')} on {hook.get('hook')}" for hook in run.plan.get("hooks", [])
    }
    if hooks.get(name) != (wanted := f"{spec.action.action_name} on {spec.hook_type}"):
        raise HookrunError(f"{named} is {hooks.get(name, 'not there')}, expected {wanted}: it has {hooks}")
    fired = {site["module"]: site["fired"] for site in run.hooks.get("sites", []) if site["hook"] == name}
    lines = defaultdict[str, list[Mapping[str, Any]]](list)
    for line in run.faults:
        if line["hook"] == name:
            lines[line["module"]].append(line)
    there = {path: next((each for each in names if each in fired), None) for path, names in places.items()}
    strange = [path for path, module in there.items() if module is None]
    missing = [module for module in lines if module not in there.values()]
    for modules, what in (
        (strange, "was not there, or the run was cut off"),
        (missing, "has faults there, and `select` leaves it out"),
    ):
        if modules:
            shown = listed([module or "(root)" for module in modules], _SHOWN)
            raise HookrunError(f"{shown}: {named} {what}")
    return {
        path: FaultList(lines[module], fired[module], named)
        for path, module in there.items()
        if module is not None
    }
