"""Plan -> installed hooks. `checking` is the installation that the compiler's shape check runs under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hookrun.plan.plan import Plan
from hookrun.proving import Findings
from hookrun.runtime.install import Installation
from hookrun.runtime.records import Probe

__all__ = ["Installation", "checking"]


@contextmanager
def checking(plan: Plan, model: nn.Module) -> Iterator[Findings]:
    """The plan's hooks on a fake model: failures are collected, nothing is recorded or printed."""
    probe = Probe()
    findings = Findings(probe.problems, probe.captured)
    with Installation(plan, model, sink=probe):
        yield findings
