"""Compares the outputs of several ways to do the same work, then times them in interleaved rounds."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[], object]
Outputs = Callable[[], Mapping[str, Any]]
"""Does the work once and returns its results: tensors by name."""

Times = Mapping[str, list[float]]
"""Name of a way -> its seconds in each round."""

OURS = "hookrun"


class OtherOutputs(Exception):
    """hookrun gives other values than the first way."""


@dataclass(frozen=True)
class Settings:
    """How thoroughly to measure.

    rounds:  interleaved rounds for short work; fewer are used for processes and files
    seconds: the approximate time for all ways of one row together
    peers:   measure other libraries too
    """

    rounds: int = 40
    seconds: float = 6.0
    peers: bool = False

    def slow(self, least: int = 3) -> int:
        """The number of rounds for work that takes seconds."""
        return max(self.rounds // 8, min(least, self.rounds))


@dataclass(frozen=True)
class Timing:
    """One way: its median seconds, and the median of its ratios to the base in each round."""

    name: str
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Result:
    """One row of the table.

    work:     what was measured
    base:     the way to which the ratios refer
    target:   the largest ratio that hookrun should have; None: no target
    compared: the ways whose outputs were equal
    missing:  way -> why it was not measured
    """

    work: str
    base: str
    target: float | None
    timings: tuple[Timing, ...]
    compared: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """hookrun's ratio to the base; None: hookrun was not measured."""
        return next((each.ratio for each in self.timings if each.name == OURS), None)

    @property
    def reached(self) -> bool | None:
        """Whether hookrun reaches the target; None: no target or no ratio."""
        return None if self.target is None or self.ratio is None else self.ratio <= self.target


@dataclass
class Ways:
    """The ways to do the same work, the base first. If a peer fails it is listed as missing; hookrun must not fail.

    lasting: the names of the outputs that are compared for peers, without those that are overwritten in place;
             None: all
    stack:   closed when the ways have been measured
    """

    runs: dict[str, Run] = field(default_factory=dict)
    outputs: dict[str, Outputs] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    lasting: frozenset[str] | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def add(self, name: str, run: Run, outputs: Outputs | None = None) -> None:
        """Add a way."""
        self.runs[name] = run
        if outputs is not None:
            self.outputs[name] = outputs

    def peer(
        self, name: str, module: str, make: Callable[[], tuple[Run, Outputs]], *, wanted: bool = True
    ) -> None:
        """Add another library's way, if the library is installed and can do this work."""
        if not wanted:
            return
        if importlib.util.find_spec(module) is None:
            self.missing[name] = "not installed"
            return
        try:
            run, outputs = make()
            run()
            outputs()
        except Exception as error:
            self.missing[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]
            return
        self.add(name, run, outputs)

    def compare(self) -> tuple[str, ...]:
        """Compare all outputs with those of the first way that has outputs; returns the names of the equal ways.

        A peer with other values is removed and listed as missing. Raises OtherOutputs if hookrun has other values.
        """
        if not self.outputs:
            return ()
        first, *others = self.outputs
        wanted = self.outputs[first]()
        lasting = {name: wanted[name] for name in wanted if self.lasting is None or name in self.lasting}
        for name in others:
            fault = difference(wanted if name == OURS else lasting, self.outputs[name]())
            if fault is None:
                continue
            if name == OURS:
                raise OtherOutputs(f"{name} against {first}: {fault}")
            del self.runs[name], self.outputs[name]
            self.missing[name] = f"other values than {first}: {fault}"
        return tuple(self.outputs)


def difference(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """How the found outputs differ from the wanted ones, or None. Further outputs are ignored."""
    import torch

    for name, value in wanted.items():
        if name not in found:
            return f"no output {name}"
        try:
            torch.testing.assert_close(
                torch.as_tensor(found[name]), torch.as_tensor(value), rtol=1e-4, atol=1e-4, check_dtype=False
            )
        except AssertionError as error:
            return f"{name}: {str(error).splitlines()[0]}"
    return None


def interleaved(runs: Mapping[str, Run], rounds: int, seconds: float) -> Times:
    """The seconds of each way in each round; work is repeated so that all rounds together take about `seconds`."""
    names = list(runs)
    for run in runs.values():
        run()
    start = time.perf_counter()
    for run in runs.values():
        run()
    repeats = max(1, int(seconds / rounds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):  # so that the order favours none
            run = runs[name]
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            times[name].append((time.perf_counter() - start) / repeats)
    return times


def judged(
    work: str,
    times: Times,
    *,
    target: float | None,
    base: str | None = None,
    compared: tuple[str, ...] = (),
    missing: Mapping[str, str] | None = None,
) -> Result:
    """The result from the times. base: by default the first way."""
    names = list(times)
    base = names[0] if base is None else base
    timings = tuple(
        Timing(
            name,
            statistics.median(times[name]),
            statistics.median(mine / bare for mine, bare in zip(times[name], times[base], strict=True)),
        )
        for name in names
    )
    return Result(work, base, target, timings, compared, dict(missing or {}))


def measured(
    work: str,
    ways: Ways,
    settings: Settings,
    *,
    target: float | None,
    base: str | None = None,
    slow: bool = False,
) -> Result:
    """Compare the outputs of the ways, then time them. slow: a single run takes more than a few milliseconds."""
    with ways.stack:
        compared = ways.compare()
        rounds = max(settings.rounds // 3, 3) if slow else settings.rounds
        times = interleaved(ways.runs, rounds, settings.seconds * (3 if slow else 1))
    return judged(work, times, target=target, base=base, compared=compared, missing=ways.missing)
