"""Values of hooks that come from outside the engine: what it asks of the caller who reads files and other runs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Generator, Tensor, dtype

from hookrun.engine.actions.autoencoders import Autoencoder
from hookrun.engine.actions.values import (
    FileValue,
    FolderValue,
    InlineFunction,
    PassValue,
    RunFaults,
    RunValue,
)
from hookrun.engine.plan.texts import DescribedData
from hookrun.engine.spec.hook import HookSpec, Spec
from hookrun.engine.trust.callables import tensor_digest
from hookrun.errors import HookrunError, Problem, counted

Places = Mapping[str, tuple[str, ...]]
"""Path of a module or parameter -> all its names."""


class PendingRun:
    """A value of a run that does not exist yet.

    name: the name of the run in the experiment
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.digest = f"not yet run: {name}"


class Rows(ABC):
    """A value for each sample of a batch.

    shape:  of one row
    draws:  rows are drawn at each firing
    digest: a hash of the rows
    """

    shape: tuple[int, ...]
    dtype: dtype
    draws: bool
    digest: str

    @abstractmethod
    def of(self, samples: Tensor, generator: Generator) -> Tensor:
        """The rows [B, *shape] of the samples [B]."""

    @abstractmethod
    def lacking(self, samples: Tensor) -> str:
        """The error message for samples that need a row and have none; empty if there is none of them."""


class FaultList:
    """The faults of a hook at one module.

    by_draw: draw -> its faults, in order
    count:   how many there are
    fired:   how often the hook fired there
    name:    of the hook and its run, for messages
    digest:  a hash of the faults
    """

    def __init__(
        self,
        by_draw: Mapping[tuple[int, ...], Sequence[Mapping[str, Any]]],
        fired: int,
        name: str,
        digest: str,
    ) -> None:
        self.count = sum(map(len, by_draw.values()))
        self.fired = fired
        self.digest = digest
        self._by_draw = by_draw
        self._name = name

    def at(self, draw: tuple[int, ...], firing: int) -> Sequence[Mapping[str, Any]]:
        """The faults of a draw in a firing, counted from 1. ValueError if there were not so many firings."""
        if firing > self.fired:
            raise ValueError(
                f"faults: {self._name} fired {self.fired:,} times there, and this is once more: repeat a run of the "
                "same length, with the same `when`"
            )
        return self._by_draw.get(draw, ())


Found = Tensor | Rows | PendingRun
"""A value from a file or from another run: one tensor, a row for each sample, or one that is not known yet."""

Source = Found | InlineFunction | PassValue | FaultList | Autoencoder
"""A value from a file or run, from Python (a tensor, or a function of the action's tensor), or from another hook; a
list of faults; what a folder holds."""


def digest_of(source: Source) -> str:
    """The hash of the value."""
    return tensor_digest(source) if isinstance(source, Tensor) else source.digest


def form(source: Source) -> tuple[str, int]:
    """The shape of the value, or of one row of it, as text, and its bytes."""
    match source:
        case PendingRun():
            return "not known yet", 0
        case InlineFunction() | PassValue():
            return "computed at each firing", 0
        case FaultList():
            return f"of {counted(source.count, 'fault')}", 0
        case Autoencoder():
            config = source.config
            size = sum(tensor.nbytes for tensor in source.tensors.values())
            return f"[{config.d_in}, {config.d_sae}] of a {config.architecture} autoencoder", size
    shape = tuple(source.shape)
    return str(list(shape)), math.prod(shape) * source.dtype.itemsize


class UsedRun(Protocol):
    """The record of a run from which values come.

    where: the key that names it
    run:   how the key names it
    path:  its directory
    need:  it is one of the experiment's needs
    """

    @property
    def where(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def need(self) -> bool: ...

    def model_dump(self) -> dict[str, Any]:
        """Plain data for plan.json."""


class Values(Protocol):
    """What reads files and other runs for a plan."""

    @property
    def of_run(self) -> bool:
        """Whether the hooks are those of a run, which has data; False: of a user's own loop."""

    @property
    def data(self) -> DescribedData | None:
        """The data of the run; None: not known, or the data of a user's own loop."""

    def read(self, value: FileValue | FolderValue | RunValue, places: Places) -> Mapping[str, Source]:
        """Path -> the value for that module. HookrunError if there is no such value, or it is of another model."""

    def faults(
        self, value: RunFaults, hook: HookSpec, places: Places
    ) -> Mapping[str, FaultList | PendingRun]:
        """Path -> the faults there that the hook repeats. HookrunError if the run has no such faults."""

    def padded_otherwise(self, value: object) -> str | None:
        """Why a token of this run is at another position in the captures that the value is read from, or None."""

    def used_runs(self, spec: Spec) -> tuple[UsedRun, ...]:
        """The runs that values of the enabled hooks come from; missing runs are left out."""

    def with_origins(self, problems: list[Problem], spec: Spec) -> list[Problem]:
        """The problems; where a hook takes values from other runs, its problems say which plans those have."""


class NoValues:
    """The engine alone, which reads no files and no runs."""

    of_run = False
    data = None

    def read(self, value: FileValue | FolderValue | RunValue, places: Places) -> Mapping[str, Source]:
        """Raise HookrunError."""
        raise HookrunError(f"{value} is read by hookrun.compile: the engine alone reads no files and no runs")

    def faults(
        self, value: RunFaults, hook: HookSpec, places: Places
    ) -> Mapping[str, FaultList | PendingRun]:
        """Raise HookrunError."""
        raise HookrunError(f"{value} is read by hookrun.compile: the engine alone reads no files and no runs")

    def padded_otherwise(self, value: object) -> str | None:
        """None, since nothing is read."""
        return None

    def used_runs(self, spec: Spec) -> tuple[UsedRun, ...]:
        """None of them."""
        return ()

    def with_origins(self, problems: list[Problem], spec: Spec) -> list[Problem]:
        """The problems as they are."""
        return problems
