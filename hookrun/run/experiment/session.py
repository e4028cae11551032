"""The process's seeds, random generators, threads and determinism: set for a run or a block, and restored."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic
from torch import nn

from hookrun.engine.runtime.rng import generators_kept
from hookrun.errors import counted, nearest, spec_error
from hookrun.run.experiment.settings import Compute
from hookrun.store.run_dir import WORKSPACE


@contextmanager
def session(compute: Compute, seed: int) -> Iterator[None]:
    """Seed all generators and apply `compute` within the block, and restore the process's state afterwards."""
    with ExitStack() as stack:
        stack.callback(set_generators, generator_states())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        for owner, flag in (
            (torch.utils.deterministic, "fill_uninitialized_memory"),
            (torch.backends.cudnn, "benchmark"),
        ):
            stack.callback(setattr, owner, flag, getattr(owner, flag))
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if compute.threads is not None:
            torch.set_num_threads(compute.threads)
        mode = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        _set_deterministic(compute.deterministic, warns=True, compiles=compute.compile)
        # after it: it is not called again where it was interrupted while it imported the compiler
        stack.callback(_set_deterministic, mode, warns=warns)
        torch.backends.cudnn.benchmark = not compute.deterministic
        yield


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
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    counts = {"cpu": 1}  # type of device -> how many there are
    if accelerator is not None:
        counts[accelerator.type] = torch.accelerator.device_count()
    with suppress(RuntimeError):  # of a name that torch does not know
        device = torch.device(name)
        if (device.index or 0) < counts.get(device.type, 0):
            return device
    raise spec_error(
        "compute.device",
        f"found {name!r}, which this machine does not have",
        nearest(name, {"auto", *counts}),
    )


def device_of(compute: Compute) -> torch.device:
    """The device `compute.device`. SpecError if it is not present.

    For a deterministic run on CUDA the workspace of cuBLAS is set, which cuBLAS reads when it starts.
    """
    device = device_named(compute.device)
    if compute.deterministic and device.type == "cuda" and not torch.cuda.is_initialized():
        os.environ.setdefault(WORKSPACE, ":4096:8")
    return device


def devices_of(model: nn.Module) -> list[str]:
    """The devices of a model that was put on several, as by a `device_map` or as stages of a pipeline; else none."""
    mapped = getattr(model, "hf_device_map", {})  # accelerate's: what it offloads has no device of its own
    devices = set(map(str, mapped.values()))
    if not devices:
        devices = {str(parameter.device) for parameter in model.parameters()}
    return sorted(devices) if len(devices) > 1 else []


def on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device; one that is on several devices is left there, and moves values by itself."""
    return model if devices_of(model) else model.to(device)


def device_notes(compute: Compute, device: torch.device, model: nn.Module) -> Iterator[str]:
    """What a run does not do on its device though it is usual or asked for."""
    if compute.deterministic and device.type == "cuda" and WORKSPACE not in os.environ:
        yield (
            f"compute.deterministic: CUDA had started before {WORKSPACE} could be set, so sums of matrix products may "
            f"differ between runs; start with {WORKSPACE}=:4096:8"
        )
    devices = devices_of(model)
    if devices:
        yield f"the model stays where it is, on {' and '.join(devices)}; batches go to {device}"


def _accelerator() -> tuple[str, Any]:
    """The type of the machine's accelerator and its module of torch, such as `torch.cuda`; ("", None) if not in use."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "", None
    module = torch.get_device_module(device)
    is_initialized = getattr(module, "is_initialized", None)  # mps has none, and is always in use
    if is_initialized is not None and not is_initialized():
        return "", None
    return device.type, module


def generator_states(*, python: bool = True) -> dict[str, Any]:
    """The states of the generators of torch, NumPy and Python, and of accelerators that are in use.

    python: with NumPy's and Python's, which take 0.3 ms in this form
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    if python:
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, words, gauss_next = random.getstate()
        python_words = torch.from_numpy(np.array(words, dtype=np.int64))
        numpy_keys = torch.from_numpy(np.asarray(keys, dtype=np.int64))
        states["python"] = (version, python_words, gauss_next)
        states["numpy"] = (str(name), numpy_keys, int(position), int(has_gauss), gauss)
    kind, module = _accelerator()
    if hasattr(module, "get_rng_state_all"):
        states[kind] = module.get_rng_state_all()
    elif kind:
        states[kind] = module.get_rng_state()
    return states


def lost_generators(states: Mapping[str, Any], now: str) -> list[str]:
    """Why a run that goes on with the generators of a state cannot equal the unbroken one.

    states: those of a `Resuming`; none: the run did not have this rank before
    now:    the type of the run's device
    """
    before = states.get("device", now)
    others = "what is drawn there, as by dropout or noise, is not what the unbroken run would have drawn"
    if before != now:
        return [
            f"the state was saved on {before}, and the run goes on on {now}: {others}, and rounding may differ"
        ]
    kind, module = _accelerator()
    if not states or kind != now:
        return []
    saved = states.get(kind, ())
    then = 1 if isinstance(saved, torch.Tensor) else len(saved)
    if then == module.device_count():
        return []
    return [
        f"the state has the random generators of {counted(then, f'{now} device')}, and this machine has "
        f"{module.device_count()}: on the others {others}"
    ]


def set_generators(states: Mapping[str, Any]) -> None:
    """Set the states of the generators. States of devices that this machine does not have are ignored."""
    if "python" in states:
        version, words, gauss_next = states["python"]
        random.setstate((version, tuple(words.tolist()), gauss_next))
        name, keys, position, has_gauss, gauss = states["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    kind, module = _accelerator()
    saved = states.get(kind)
    if isinstance(saved, torch.Tensor):
        module.set_rng_state(saved)
    elif saved is not None:
        for index, state in enumerate(saved[: module.device_count()]):
            module.set_rng_state(state, index)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator within the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def all_seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch (CPU), NumPy and Python within the block; five times slower than `seeded`."""
    with generators_kept():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        yield
