"""A session sets seeds and all global settings of a run, and restores the process afterwards."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from hookrun.errors import SpecError
from hookrun.run.experiment import session as session_module
from hookrun.run.experiment.session import (
    all_seeded,
    device_named,
    device_notes,
    device_of,
    generator_states,
    seeded,
    session,
    set_generators,
)
from hookrun.run.experiment.settings import Compute
from hookrun.store.run_dir import WORKSPACE

ONE = Compute(threads=1)


def state() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(),
        torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
    )  # fmt: skip


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_one_seed_gives_the_same_draws(seed: int) -> None:
    found = []
    for _ in range(2):
        with session(ONE, seed):
            found.append(draws())
        draws()
    assert found[0] == found[1]
    with session(ONE, seed - 1 if seed else 1):
        assert draws() != found[0]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_process_is_restored_after_any_end_of_the_session(
    deterministic: bool, error: type[BaseException] | None
) -> None:
    before = state()
    compute = Compute(threads=1, deterministic=deterministic)
    with nullcontext() if error is None else pytest.raises(error), session(compute, 3):
        draws()
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.backends.cudnn.benchmark != deterministic
        torch.utils.deterministic.fill_uninitialized_memory = False  # as after the first batch
        if error is not None:
            raise error
    assert state() == before


def test_the_user_s_settings_are_restored() -> None:
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        with session(Compute(deterministic=False), 0):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_is_a_device_of_this_machine() -> None:
    assert device_named("cpu") == torch.device("cpu")
    chosen = device_named("auto")
    assert torch.ones(1, device=chosen).item() == 1
    assert (chosen.type == "cpu") == (not torch.accelerator.is_available())


@pytest.mark.parametrize("name", ["cud", "cpuu", "", "cuda:99", "meta", "xla"])
def test_a_device_that_this_machine_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"compute\.device: found"):
        device_named(name)


def test_seeded_blocks_repeat() -> None:
    states = generator_states()
    outside = draws()
    set_generators(states)
    with all_seeded(2**32 + 7):  # more than NumPy accepts
        first = draws()
    with pytest.raises(ZeroDivisionError), all_seeded(2**32 + 7):
        assert draws() == first
        raise ZeroDivisionError
    with seeded(2**32 + 7):
        assert float(torch.rand(())) == first[0]
    assert draws() == outside


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """CUDA as the device that is asked for, which has not started."""
    monkeypatch.setattr(session_module, "device_named", lambda name: torch.device(name))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    return torch.device("cuda")


def notes(compute: Compute, device: torch.device) -> list[str]:
    return list(device_notes(compute, device, torch.nn.Linear(1, 1)))


def test_the_workspace_of_cublas_is_set_before_cuda_starts(cuda: torch.device) -> None:
    compute = Compute(device="cuda")
    assert device_of(compute) == cuda
    assert os.environ[WORKSPACE] == ":4096:8"
    assert notes(compute, cuda) == []


def test_the_user_s_workspace_is_kept(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    device_of(Compute(device="cuda"))
    assert os.environ[WORKSPACE] == ":16:8"


def test_a_workspace_that_comes_too_late_is_told(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    compute = Compute(device="cuda")
    device_of(compute)
    assert WORKSPACE not in os.environ
    (note,) = notes(compute, cuda)
    assert note.startswith(
        "compute.deterministic: CUDA had started before CUBLAS_WORKSPACE_CONFIG could be set"
    )
    assert notes(Compute(device="cuda", deterministic=False), cuda) == []
    assert notes(compute, torch.device("cpu")) == []


def test_a_run_that_is_not_deterministic_sets_no_workspace(cuda: torch.device) -> None:
    device_of(Compute(device="cuda", deterministic=False))
    device_of(Compute(device="cpu"))
    assert WORKSPACE not in os.environ
