"""The device's own random generator is seeded, saved and guarded as that of the CPU, and batches come pinned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.command.sweeps import jobs
from hookrun.run.experiment.session import generator_states, lost_generators, session, set_generators
from hookrun.run.experiment.settings import Compute
from hookrun.run.passes import batches
from hookrun.store.reader import Run
from hookrun.store.run_dir import environment


def test_a_session_restores_the_device_s_next_draws(device: torch.device) -> None:
    torch.rand(1, device=device)  # the generator is in use
    torch.manual_seed(5)
    expected = torch.rand(3, device=device)
    torch.manual_seed(5)
    with session(Compute(threads=1), 9):
        drawn = torch.rand(3, device=device)
    assert not torch.equal(drawn, expected)
    assert torch.equal(torch.rand(3, device=device), expected)


def test_a_state_has_the_generators_of_every_device_of_the_type(device: torch.device) -> None:
    torch.rand(1, device=device)
    states = generator_states()
    assert len(states[device.type]) == torch.accelerator.device_count()
    first = torch.rand(3, device=device)
    set_generators(states)
    assert torch.equal(torch.rand(3, device=device), first)


def test_a_state_of_more_devices_says_which_are_missing(device: torch.device) -> None:
    torch.rand(1, device=device)
    states = {**generator_states(), "device": device.type}
    assert lost_generators(states, device.type) == []
    first = torch.rand(3, device=device)
    count = torch.accelerator.device_count()
    more = {**states, device.type: [*states[device.type], states[device.type][0]]}
    set_generators(more)
    assert torch.equal(torch.rand(3, device=device), first)
    (note,) = lost_generators(more, device.type)
    assert f"the random generators of {count + 1} {device.type} devices, and this machine has {count}" in note


def test_a_state_without_generators_of_the_device_says_so(device: torch.device) -> None:
    states = generator_states()
    (note,) = lost_generators({"torch": states["torch"], "device": "cpu"}, device.type)
    assert f"saved on cpu, and the run goes on on {device.type}" in note
    set_generators(
        {"torch": states["torch"], "cuda": [], "xpu": [states["torch"]]}
    )  # of devices that are not used


def drawing(x: Tensor) -> Tensor:
    """Draws without a generator."""
    return x + torch.rand(x.shape, device=x.device)


def test_a_function_that_draws_on_the_device_is_told(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    hooks = {"own": {"select": "", "hook": "forward", "action": "python", "function": drawing}}
    with (
        hookrun.hooked(model, hooks),
        pytest.raises(hookrun.HookError, match="draws from torch's global generator"),
    ):
        model(torch.ones(2, 4, device=device))


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_from_pinned_memory(
    workers: int, run: Callable[..., Run], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[bool]()
    real = batches.Batch.to

    def to(self: batches.Batch, *args: object, **options: object) -> batches.Batch:
        found.extend((self.inputs.is_pinned(), self.target.is_pinned()))
        return real(self, *args, **options)

    monkeypatch.setattr(batches.Batch, "to", to)
    run("task=evaluate", "train.limit_batches=2", "data.batch_size=8", f"data.workers={workers}")
    assert found == [True] * 4


def test_the_environment_names_the_device(device: torch.device, tmp_path: Path) -> None:
    named = torch.get_device_module(device).get_device_name()
    assert environment([], str(device))["device_name"] == named
    assert environment([], "cpu")["device_name"] != named


def test_memory_of_a_job_is_given_back_before_the_next(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied = list[bool]()
    monkeypatch.setattr(torch.get_device_module(device), "empty_cache", lambda: emptied.append(True))
    jobs.free_job_memory()
    assert emptied == [True]
