"""Tensors that hooks take from other runs."""

from __future__ import annotations

from torch import Tensor

from hookrun.actions.values import RunValue
from hookrun.errors import HookrunError
from hookrun.store.captures import Capture
from hookrun.store.reader import open_run

ROWS_AT_ONCE = 4096


def read_run_value(value: RunValue) -> Tensor:
    """The mean over all rows of what `value.run` captured, in float32. Raises HookrunError where there is none."""
    capture = open_run(value.run).captures[value.capture][value.module]
    if not isinstance(capture, Capture):
        raise HookrunError(
            f"{value.capture}/{value.module} in {value.run} holds several tensors: {', '.join(capture)}"
        )
    if not len(capture):
        raise HookrunError(f"{value.capture}/{value.module} in {value.run} holds no rows")
    total = sum(
        (
            capture[start : start + ROWS_AT_ONCE].double().sum(0)
            for start in range(0, len(capture), ROWS_AT_ONCE)
        ),
        start=capture[0].double() * 0,
    )
    return (total / len(capture)).float()
