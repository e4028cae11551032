"""What depends on private state of torch for speed: direct calls, copies on write, statistics of small tensors.

Each file asks here for the private objects that it needs. If torch lacks one of them, or if ``HOOKRUN_FAST=0`` was in
the environment when hookrun was imported, the file does nothing, and the plain way gives the same results.
"""

from __future__ import annotations

import os
import warnings
from operator import attrgetter
from typing import Any

import torch

from hookrun.errors import HookrunWarning

IS_ON = os.environ.get("HOOKRUN_FAST") != "0"

if "HOOKRUN_KERNELS" in os.environ:
    warnings.warn(
        "HOOKRUN_KERNELS has no effect: hookrun has no code in C any more; HOOKRUN_FAST=0 turns off what uses "
        "private state of torch",
        HookrunWarning,
        stacklevel=2,
    )


def private(*names: str) -> list[Any]:
    """The objects of torch at these paths; if one is missing, or if the user has turned them off, each is None."""
    try:
        objects = [attrgetter(name)(torch) for name in names]
    except AttributeError:
        objects = []
    return objects if objects and IS_ON else [None] * len(names)
