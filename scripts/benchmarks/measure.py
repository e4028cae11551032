"""Ways of doing the same work, their outputs compared, then timed in interleaved rounds."""

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
"""Does the work once, and says what came of it: tensors by name."""

Times = Mapping[str, list[float]]
"""Way -> its seconds in each round."""

OURS = "hookrun"


class OtherOutputs(Exception):
    """A way that gives other values than the first one."""


@dataclass(frozen=True)
class Settings:
    """How thoroughly to measure.

    rounds:  interleaved rounds of what takes microseconds; whole processes and files take fewer
    seconds: about so long for all ways of one work together
    peers:   other libraries too
    """

    rounds: int = 40
    seconds: float = 6.0
    peers: bool = False

    def slow(self, least: int = 3) -> int:
        """Rounds of what takes seconds."""
        return max(self.rounds // 8, min(least, self.rounds))


@dataclass(frozen=True)
class Timing:
    """One way: median seconds, and the median over the rounds of its ratio to the base."""

    name: str
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Result:
    """One row of the table.

    base:     the way that ratios are to
    target:   hookrun's ratio is to be at most that; None: there is none
    compared: the ways whose outputs were found equal
    missing:  way -> why it is not there
    """

    work: str
    base: str
    target: float | None
    timings: tuple[Timing, ...]
    compared: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """That of hookrun."""
        return next((each.ratio for each in self.timings if each.name == OURS), None)

    @property
    def reached(self) -> bool | None:
        """Whether hookrun keeps to the target; None where there is nothing to keep to."""
        return None if self.target is None or self.ratio is None else self.ratio <= self.target


@dataclass
class Ways:
    """The ways of doing one work, the base first. A peer that fails is missing; hookrun that fails is an error.

    lasting: the names of outputs that peers have to give rightly, where others are overwritten in place; None: all
    """

    runs: dict[str, Run] = field(default_factory=dict)
    outputs: dict[str, Outputs] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    lasting: frozenset[str] | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def add(self, name: str, run: Run, outputs: Outputs | None = None) -> None:
        """A way that is always there."""
        self.runs[name] = run
        if outputs is not None:
            self.outputs[name] = outputs

    def peer(
        self, name: str, module: str, make: Callable[[], tuple[Run, Outputs]], *, wanted: bool = True
    ) -> None:
        """Another library's way, where that can be imported and does this work."""
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
        """The ways that give the values of the first one that says what it gives. A peer that does not is missing."""
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
    """What is not as it should be, or None. There may be more than what is wanted."""
    import torch

    for name, value in wanted.items():
        if name not in found:
            return f"nothing of {name}"
        try:
            torch.testing.assert_close(
                torch.as_tensor(found[name]), torch.as_tensor(value), rtol=1e-4, atol=1e-4, check_dtype=False
            )
        except AssertionError as error:
            return f"{name}: {str(error).splitlines()[0]}"
    return None


def interleaved(runs: Mapping[str, Run], rounds: int, seconds: float) -> Times:
    """The seconds of each way in each round, its runs repeated so that all rounds together take about `seconds`."""
    names = list(runs)
    for run in runs.values():
        run()
    start = time.perf_counter()
    for run in runs.values():
        run()
    repeats = max(1, int(seconds / rounds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):  # whoever comes first has no advantage
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
    """The medians of what was timed. base: the first way, unless another is named."""
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
    """Compare what the ways give, then time them. slow: one run takes more than some milliseconds."""
    with ways.stack:
        compared = ways.compare()
        rounds = max(settings.rounds // 3, 3) if slow else settings.rounds
        times = interleaved(ways.runs, rounds, settings.seconds * (3 if slow else 1))
    return judged(work, times, target=target, base=base, compared=compared, missing=ways.missing)
