"""Copies on the host that are made while the program goes on: in themselves, of states and of offloaded tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import second_device
import torch
from torch import Tensor, nn

import hookrun
from hookrun.engine.values import host_copies
from hookrun.engine.values.host_copies import HostCopies, HostCopy, copy_to_host
from hookrun.store.background import Background

is_second = pytest.mark.skipif(os.environ.get("HOOKRUN_TEST_DEVICE", "second") != "second", reason="second")

OFFLOAD = {"select": "*", "hook": "saved_tensors", "action": "offload", "to": "cpu"}
CAST = {"select": "*", "hook": "saved_tensors", "action": "cast", "dtype": "bfloat16"}


def test_a_copy_is_of_the_moment_when_it_was_begun(device: torch.device) -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    moved = x.to(device)
    copy = copy_to_host(moved)
    moved.zero_()
    assert torch.equal(copy.wait(), x)
    assert copy.tensor.stride() == x.stride()
    assert copy.under_way is not None
    assert copy.under_way.is_complete()


def test_a_copy_begun_in_inference_mode_may_arrive_outside(device: torch.device) -> None:
    """Only there, tensors that were made in inference mode must not be written."""
    with torch.inference_mode():
        copy = copy_to_host(torch.ones(3).to(device) + 1)
    assert copy.wait().add_(1).tolist() == [3, 3, 3]


@is_second
def test_clones_are_released_while_later_tensors_are_copied(device: torch.device) -> None:
    copies = HostCopies(device)
    x = torch.ones(3).to(device)
    under_way = copies.begin(x).under_way
    assert under_way is not None
    clone = weakref.ref(under_way.source)
    for _ in range(3):
        copies.begin(x)
    assert clone() is None
    assert under_way.source is None


def test_a_state_is_written_with_the_content_at_the_call(device: torch.device) -> None:
    """Training goes on while it is copied."""
    weight = torch.zeros(4).to(device)
    written = list[list[float]]()
    writing = Background("states")

    def write(tensors: Mapping[str, Tensor]) -> None:
        written.append([*tensors["weight"].tolist(), *tensors["part"].tolist()])

    for number in range(10):
        weight += 1
        with second_device.watch() as seen:
            writing.write("state", {"weight": weight, "part": weight[:1]}, write)
        assert not seen.waits, seen
        if number % 3 == 0:
            writing.wait()
    writing.close()
    assert written == [[number] * 5 for number in (1.0, 4.0, 7.0, 10.0)]


class InPlace(nn.Module):
    """Saves tensors for its backward, and changes some of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        return self.out(nn.functional.gelu(x).mean((2, 3))).square()


def gradients(device: torch.device | str, *hooks: dict[str, Any]) -> tuple[list[Tensor], second_device.Seen]:
    """The gradients of all parameters, and what the second device has seen in a second step."""
    torch.manual_seed(0)
    model = InPlace().to(device)
    x = torch.randn(4, 3, 10, 10).to(device)
    with hookrun.hooked(model, {f"hook{number}": hook for number, hook in enumerate(hooks)}):
        for _ in range(2):
            model.zero_grad()
            with second_device.watch() as seen:
                model(x).sum().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None], seen


@pytest.mark.filterwarnings("ignore:.*never fired")
@pytest.mark.parametrize(
    "hooks", [[OFFLOAD], [OFFLOAD, CAST], [CAST, OFFLOAD]], ids=["alone", "first", "last"]
)
def test_gradients_of_offloaded_tensors_are_those_of_the_cpu(
    device: torch.device, hooks: list[dict[str, Any]]
) -> None:
    """Alone, and together with a hook that reads or made what is offloaded."""
    expected, _ = gradients("cpu", *hooks)
    found, _ = gradients(device, *hooks)
    assert len(found) == 6
    assert are_close(found, expected)


def are_close(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether they are equal up to rounding."""
    return all(
        torch.allclose(one, other, atol=1e-3, rtol=1e-3) for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.filterwarnings("ignore:.*never fired")
def test_saved_tensors_hooks_of_the_user_get_complete_copies(device: torch.device) -> None:
    expected, _ = gradients("cpu")
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        found, _ = gradients(device, OFFLOAD)
    assert are_close(found, expected)


@is_second
@pytest.mark.filterwarnings("ignore:.*never fired")
def test_offloading_waits_at_most_once_in_a_step(device: torch.device) -> None:
    """The backward pass begins with the newest copy."""
    _, seen = gradients(device, OFFLOAD)
    assert len(seen.waits) <= 1, seen
    assert not seen.uploads, seen
    assert len(seen) > 4


@is_second
@pytest.mark.filterwarnings("ignore:.*never fired")
def test_offloaded_tensors_that_are_read_too_early_are_noticed(device: torch.device, monkeypatch) -> None:
    expected, _ = gradients("cpu", OFFLOAD)
    monkeypatch.setattr(HostCopy, "wait", lambda self: self.tensor)
    found, _ = gradients(device, OFFLOAD)
    assert not are_close(found, expected)


@is_second
def test_no_more_than_the_bound_waits_to_be_copied(device: torch.device, monkeypatch) -> None:
    """A tensor above it waits until it is the only one."""
    monkeypatch.setattr(host_copies, "MOST_HELD", 1_000)
    monkeypatch.setattr(second_device.Event, "query", lambda self: False)
    copies = HostCopies(device)
    small = torch.zeros(100).to(device)
    large = torch.zeros(1_000).to(device)
    begun = [copies.begin(small).under_way for _ in range(3)]

    def waits() -> list[bool]:
        return [each is not None and each.source is not None for each in begun]

    assert waits() == [False, True, True]
    begun.append(copies.begin(large).under_way)
    assert waits() == [False, False, False, True]
    begun.append(copies.begin(small).under_way)
    assert waits() == [False, False, False, False, True]


def test_memory_of_the_host_is_free_once_its_copy_is_complete(device: torch.device) -> None:
    """Also if nothing is copied after it."""
    copies = HostCopies(device)
    memory = host_copies.host_memory(12)
    freed = weakref.ref(memory)
    storage = weakref.ref(memory.untyped_storage())
    copy = copies.begin(torch.ones(3).to(device), memory)
    assert copy.wait().tolist() == [1, 1, 1]
    del copy, memory
    assert freed() is None
    assert storage() is None
