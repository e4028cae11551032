"""A capture does not change which tensors share memory, and does not follow later writes to shared memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils import dlpack

import hookrun

CAPTURE = {"h": {"select": "", "hook": "forward", "action": "capture"}}
Shared = tuple[Tensor, Callable[[], list[float]], Callable[[float], object]]


def of_array(tensor: Tensor, array: Any) -> Shared:
    """A tensor on the memory of an array, a function that reads the array, and one that fills it."""
    return tensor, lambda: np.asarray(array).reshape(-1).tolist(), lambda number: array.fill(number)


def of_tensor(tensor: Tensor, other: Tensor) -> Shared:
    return tensor, lambda: other.reshape(-1).tolist(), lambda number: other.fill_(number)


def from_numpy() -> Shared:
    array = np.ones(4, dtype=np.float32)
    return of_array(torch.from_numpy(array), array)


def a_slice_of_numpy() -> Shared:
    array = np.ones((4, 4), dtype=np.float32)
    return of_array(torch.from_numpy(array)[1], array[1])


def to_numpy() -> Shared:
    tensor = torch.ones(4)
    return of_array(tensor, tensor.numpy())


def to_numpy_through_a_view() -> Shared:
    tensor = torch.ones(4)
    return of_array(tensor.view(2, 2), tensor.detach().numpy())


def transposed_to_numpy() -> Shared:
    tensor = torch.ones(2, 2)
    return of_array(tensor.t(), tensor.numpy())


def numpy_of_complex() -> Shared:
    tensor = torch.full((2,), 1 + 1j, dtype=torch.complex64)
    return of_array(torch.view_as_real(tensor), tensor.numpy().view(np.float32))


def exported_by_dlpack() -> Shared:
    tensor = torch.ones(4)
    return of_array(tensor, np.from_dlpack(tensor))


def exported_by_dlpack_detached() -> Shared:
    tensor = torch.ones(4, requires_grad=True) * 1
    return of_array(tensor, np.from_dlpack(tensor.detach()))


def exported_by_dlpack_before_it_required_a_gradient() -> Shared:
    tensor = torch.ones(4)
    array = np.from_dlpack(tensor)
    return of_array(tensor.requires_grad_(), array)


def a_view_of_what_dlpack_exported() -> Shared:
    tensor = torch.ones(4)
    array = np.from_dlpack(tensor)
    return of_array(tensor.view(2, 2), array)


def exported_as_a_capsule() -> Shared:
    tensor = torch.ones(4)
    return of_tensor(tensor, dlpack.from_dlpack(dlpack.to_dlpack(tensor)))


def imported_by_dlpack() -> Shared:
    tensor = torch.ones(4)
    return of_tensor(torch.from_dlpack(tensor), tensor)


def a_buffer() -> Shared:
    memory = bytearray(np.ones(4, dtype=np.float32).tobytes())
    return of_array(torch.frombuffer(memory, dtype=torch.float32), np.frombuffer(memory, np.float32))


def a_mapped_file() -> Shared:
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115 (lives as long as the array)
    file.write(np.ones(4, dtype=np.float32).tobytes())
    file.flush()
    array: Any = np.memmap(file.name, dtype=np.float32, mode="r+")
    storage = torch.UntypedStorage.from_file(file.name, True, 16)
    tensor = torch.empty(0).set_(storage, 0, (4,))  # type: ignore[call-overload]
    return tensor, lambda: [float(number) for number in array], lambda number: array.fill(number)


def processes() -> Shared:
    tensor = torch.ones(4).share_memory_()
    return of_tensor(tensor, torch.empty(0).set_(tensor.untyped_storage(), 0, (4,)))  # type: ignore[call-overload]


def a_view() -> Shared:
    tensor = torch.ones(4)
    return of_tensor(tensor, tensor.view(2, 2))


def a_base() -> Shared:
    tensor = torch.ones(4, 2)
    return of_tensor(tensor[:2], tensor[:2].view(-1))


def detached() -> Shared:
    tensor = torch.ones(4)
    return of_tensor(tensor, tensor.detach())


def the_same_storage() -> Shared:
    tensor = torch.ones(4)
    return of_tensor(tensor, torch.empty(0).set_(tensor.untyped_storage(), 0, (4,)))  # type: ignore[call-overload]


def expanded() -> Shared:
    array = np.ones((1,), dtype=np.float32)
    return of_array(torch.from_numpy(array).expand(4), array)


SHARED = [
    from_numpy, a_slice_of_numpy, to_numpy, to_numpy_through_a_view, transposed_to_numpy, numpy_of_complex,
    exported_by_dlpack, exported_by_dlpack_detached, exported_by_dlpack_before_it_required_a_gradient,
    a_view_of_what_dlpack_exported, exported_as_a_capsule, imported_by_dlpack, a_buffer, a_mapped_file, processes,
    a_view, a_base, detached, the_same_storage, expanded,
]  # fmt: skip
OBSERVERS: dict[str, dict[str, Any]] = {
    "capture": CAPTURE,
    "its arguments": {"h": {"select": "", "hook": "forward_pre", "action": "capture"}},
    "a member": {"h": {"select": "", "hook": "forward", "action": "capture", "target": "[0]"}},
    "in a container": CAPTURE,
    "a part": {"h": {"select": "", "hook": "forward", "action": "capture", "index": "..., :"}},
    "the shape's budget": {"h": {"select": "", "hook": "forward", "action": "capture", "max_bytes": 10**6}},
    "stats": {"h": {"select": "", "hook": "forward", "action": "stats"}},
}


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("make", SHARED)
@pytest.mark.parametrize("times", [1, 3])
def test_tensors_share_memory_after_an_observer_as_before(
    make: Callable[[], Shared], observer: str, times: int
) -> None:
    tensor, outside, fill = make()
    value: Any = (tensor, [1]) if observer in ("in a container", "a member") else tensor
    with hookrun.hooked(nn.Identity(), OBSERVERS[observer]) as hooks:
        for _ in range(times):
            hooks._model(value)
    with torch.no_grad():
        if tensor._is_view() and tensor.stride() == (0,):  # expanded: torch refuses to write to it
            fill(5)
            assert tensor.tolist() == [5.0] * 4
            return
        tensor.add_(2)
        assert set(outside()) == {3.0}, (
            "a write to the tensor must reach the tensors and arrays on the same memory"
        )
        fill(5)
        assert set(tensor.detach().reshape(-1).tolist()) == {5.0}, "and the other way round"


WRITES = [
    (make, by) for make in SHARED for by in ("tensor", "outside") if make is not expanded or by == "outside"
]


@pytest.mark.parametrize(("make", "by"), WRITES)
def test_a_capture_does_not_follow_later_writes(make: Callable[[], Shared], by: str) -> None:
    tensor, _, fill = make()
    model = nn.Identity()
    with hookrun.hooked(model, CAPTURE) as hooks, torch.no_grad():
        for number in (1.0, 5.0, 6.0):
            if by == "outside":
                fill(number)
            else:
                tensor.fill_(number)
            model(tensor)
        fill(9)
    assert [set(kept.reshape(-1).tolist()) for kept in hooks.captures["h"][""]] == [{1.0}, {5.0}, {6.0}]


LATER: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda tensor: tensor.numpy(),
    "DLPack": lambda tensor: np.from_dlpack(tensor),
    "a view's numpy": lambda tensor: tensor.view(2, 2).numpy(),
    "numpy of the capture's alias": lambda tensor: tensor.detach().numpy(),
}


@pytest.mark.parametrize("name", LATER)
def test_an_array_exported_after_a_capture_shares_memory_with_the_tensor(name: str) -> None:
    tensor, model = torch.ones(4), nn.Identity()
    with hookrun.hooked(model, CAPTURE) as hooks:
        model(tensor)
        array = LATER[name](tensor)
        model(tensor)
        model(tensor.view(4))
        array.fill(5)
        assert tensor.tolist() == [5.0] * 4
        tensor.fill_(6)
        assert set(array.reshape(-1).tolist()) == {6.0}
    assert [kept.tolist() for kept in hooks.captures["h"][""]] == [[1.0] * 4] * 3


class Reused(nn.Module):
    """Returns the same memory at each call, like environments and pre-allocated caches."""

    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(3, dtype=np.float32)
        self.out = torch.from_numpy(self.array)

    def forward(self, x: Tensor) -> Tensor:
        self.array[:] = x.numpy()
        return self.out


@pytest.mark.parametrize("hook", ["forward", "forward_pre"])
def test_captures_of_reused_memory_keep_the_value_of_each_call(hook: str) -> None:
    model = nn.Sequential(Reused(), nn.Identity())
    with hookrun.hooked(model, {"h": {"select": "1", "hook": hook, "action": "capture"}}) as hooks:
        for number in range(4):
            model(torch.full((3,), float(number)))
    assert [kept.tolist() for kept in hooks.captures["h"]["1"]] == [[float(n)] * 3 for n in range(4)]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_backward_or_forward_observer_leaves_the_callers_array_connected(mode: Any) -> None:
    array = np.ones((2, 3), dtype=np.float32)
    x = torch.from_numpy(array)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    spec = {
        "b": {"select": "0", "hook": "backward", "action": "capture"},
        "f": {"select": "**", "hook": "forward_pre", "action": "capture"},
    }
    with hookrun.hooked(model, spec), mode():
        x.requires_grad_(torch.is_grad_enabled())
        model(x)
    with torch.no_grad():
        x.add_(1)
    assert array.tolist() == [[2.0] * 3] * 2


def test_loaded_weights_are_captured_and_stay_connected(tmp_path: Any) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")["w"]
    alias, model = loaded.view(3), nn.Identity()
    with hookrun.hooked(model, CAPTURE) as hooks:
        model(loaded)
    loaded.fill_(2)
    assert alias.tolist() == [2.0] * 3 and hooks.captures["h"][""][0].tolist() == [1.0] * 3


class Sub(Tensor):
    """A user's subclass of Tensor."""


KINDS: dict[str, Callable[[], Tensor]] = {
    "subclass": lambda: torch.ones(2, 2).as_subclass(Sub),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.ones(3, device="meta"),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")  # torch's warnings about prototypes and old layouts
@pytest.mark.parametrize("budget", [None, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_tensors_keep_their_kind(kind: str, budget: int | None) -> None:
    tensor, model = KINDS[kind](), nn.Identity()
    spec = {"h": {**CAPTURE["h"], **({} if budget is None or kind == "mkldnn" else {"max_bytes": budget})}}
    with hookrun.hooked(model, spec) as hooks:
        model(tensor)
        model([tensor])
    alone, (inside,) = hooks.captures["h"][""]
    for kept in (alone, inside):
        assert type(kept) is type(tensor) and kept.layout == tensor.layout and kept is not tensor
        assert kept.dtype == tensor.dtype and kept.device == tensor.device
