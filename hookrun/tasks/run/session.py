"""Sets the process's seeds, threads and determinism for a run, and restores them afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
import torch.utils.deterministic

from hookrun.errors import Problem, SpecError, nearest
from hookrun.spec.experiment import Compute
from hookrun.tasks.run.generators import generator_states, set_generators


@contextmanager
def session(compute: Compute, seed: int) -> Iterator[None]:
    """Seed all generators and apply `compute` within the block, and restore the process's state afterwards."""
    generators, threads = generator_states(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    with ExitStack() as stack:
        stack.callback(set_generators, generators)
        stack.callback(torch.set_num_threads, threads)
        stack.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", fills)
        stack.callback(setattr, torch.backends.cudnn, "benchmark", benchmark)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if compute.threads is not None:
            torch.set_num_threads(compute.threads)
        _set_deterministic(compute.deterministic, warns=True, compiles=compute.compile)
        stack.callback(_set_deterministic, deterministic, warns=warns)
        torch.backends.cudnn.benchmark = not compute.deterministic
        yield


def leave_new_memory() -> None:
    """Until the end of the session, new memory is not filled with NaN first, as torch does in deterministic mode.

    The results of a program do not depend on that, unless it reads memory that it has not written. Filling takes up to
    a tenth of the time of a small convolutional network.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _set_deterministic(mode: bool, *, warns: bool, compiles: bool = False) -> None:
    """As `torch.use_deterministic_algorithms`, which also imports the whole compiler to configure it.

    If nothing is or will be compiled, another function of torch is called that configures only the operators.
    """
    if compiles or "torch._dynamo" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warns)
    else:
        torch.set_deterministic_debug_mode(("warn" if warns else "error") if mode else "default")


def device_named(name: str) -> torch.device:
    """The device of this name; `auto` is the accelerator, if there is one. SpecError if the device is not present."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    there = {"auto", "cpu"} | ({accelerator.type} if accelerator else set())
    try:
        device = torch.device(name)
        count = torch.accelerator.device_count() if accelerator and device.type == accelerator.type else 1
        if device.type in there and (device.index or 0) < count:
            return device
    except RuntimeError:  # torch does not know the name
        pass
    raise SpecError(
        [Problem("compute.device", f"found {name!r}, which this machine does not have", nearest(name, there))]
    )
