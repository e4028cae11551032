"""What a run changes in the process: seeds, threads, determinism. Set on entry, as before on exit."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from hookrun.errors import Problem, SpecError, nearest
from hookrun.spec.experiment import Compute


@contextmanager
def session(compute: Compute, seed: int) -> Iterator[None]:
    """Everything that draws or computes starts from `seed` and `compute`, and the process is given back unchanged."""
    python, numpy = random.getstate(), np.random.get_state()
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    with ExitStack() as stack:
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.callback(random.setstate, python)
        stack.callback(np.random.set_state, numpy)
        stack.callback(torch.set_num_threads, threads)
        stack.callback(setattr, torch.backends.cudnn, "benchmark", benchmark)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        _seed_torch(seed)
        if compute.threads is not None:
            torch.set_num_threads(compute.threads)
        _set_deterministic(compute.deterministic, warns=True, compiles=compute.compile)
        stack.callback(_set_deterministic, deterministic, warns=warns)
        torch.backends.cudnn.benchmark = not compute.deterministic
        yield


def _seed_torch(seed: int) -> None:
    """As `torch.manual_seed`, which also keeps a traceback for each kind of accelerator that the machine lacks."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _set_deterministic(mode: bool, *, warns: bool, compiles: bool = False) -> None:
    """As `torch.use_deterministic_algorithms`, which sets the same for the compiler, too, and imports all of it.

    So where nothing is or will be compiled, the other function of torch's that sets the operators is called.
    """
    if compiles or "torch._dynamo" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warns)
    else:
        torch.set_deterministic_debug_mode(("warn" if warns else "error") if mode else "default")


def device_named(name: str) -> torch.device:
    """`auto` is the accelerator where there is one. Raises SpecError for a device that this machine lacks."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    there = {"auto", "cpu"} | ({accelerator.type} if accelerator else set())
    try:
        device = torch.device(name)
        count = torch.accelerator.device_count() if accelerator and device.type == accelerator.type else 1
        if device.type in there and (device.index or 0) < count:
            return device
    except RuntimeError:  # torch knows no such name
        pass
    raise SpecError(
        [Problem("compute.device", f"found {name!r}, which this machine does not have", nearest(name, there))]
    )
