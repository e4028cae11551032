"""A captured value is that of the hook time, however memory is shared; a captured part holds its own memory alone."""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hooking import captured, one_hook
from safetensors.torch import load_file, save_file
from small_nets import Net
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode

import hookrun
from hookrun.engine.runtime import fast
from hookrun.engine.runtime.snapshot import held

WIDTH = 4


def fill_a_part(_: nn.Module, x: Tensor) -> Tensor:
    x[:, :2].fill_(0.5)
    return x


def add_to_a_part(_: nn.Module, x: Tensor) -> Tensor:
    x[:, 2:].add_(3)
    return x * 1


def sine_into_a_tensor(_: nn.Module, x: Tensor) -> Tensor:
    if x.requires_grad:
        return x.sin()
    return torch.sin(x * 1, out=torch.empty(0))


WRITERS: list[Callable[..., Tensor]] = [
    lambda _, x: x.add_(1),
    lambda _, x: x.mul_(2),
    lambda _, x: functional.relu_(x),
    fill_a_part,
    lambda _, x: x.view(-1).view_as(x),
    add_to_a_part,
    lambda _, x: x.t().mul_(1.5).t(),
    sine_into_a_tensor,
]
"""They write to their argument or to its base, or return a view."""


CAPTURES = {
    "pre": {"select": {"path": "**", "leaf": True}, "hook": "forward_pre", "action": "capture"},
    "out": {"select": {"path": "**", "leaf": True}, "hook": "forward", "action": "capture"},
}
MODES: dict[str, Any] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", range(5))
def test_captures_equal_clones_despite_later_writes(part: int, mode: str) -> None:
    x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
    for seed in range(part * 8, part * 8 + 8):
        model = random_model(seed)

        def run(model: nn.Module = model, seed: int = seed) -> None:
            for number in range(3):  # the first firings decide how later ones are copied
                torch.manual_seed(seed + number)
                with MODES[mode]():
                    model(x.clone())

        expected = by_hand(model, run)
        with hookrun.hooked(model, CAPTURES) as hooks:
            run()
        for name in ("pre", "out"):
            for path, values in expected[name].items():
                assert_close(hooks.captures[name][path], values, rtol=0, atol=0, equal_nan=True)


class Copies(TorchDispatchMode):
    """Counts the operations that copy a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.clone.default, aten.copy_.default, aten._to_copy.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not fast.IS_ON, reason="these are copies on write")
@pytest.mark.parametrize("grad", [True, False])
def test_without_writes_nothing_is_copied(grad: bool) -> None:
    """No operation copies a tensor, and each capture has the output's own memory."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    outputs: list[Tensor] = []
    for module in model:
        module.register_forward_hook(lambda _m, _a, output: outputs.append(output))
    x = torch.ones(3, WIDTH)
    with hookrun.hooked(model, CAPTURES) as hooks, torch.set_grad_enabled(grad), Copies() as copies:
        for _ in range(4):
            model(x)
    assert copies.count == 0
    captured = [hooks.captures["out"][str(number)][turn] for turn in range(4) for number in range(3)]
    for ours, theirs in zip(captured, outputs, strict=True):
        assert torch._C._data_address(ours) == torch._C._data_address(theirs)
        assert not ours.requires_grad, "nor keeps it the graph alive"


@pytest.mark.skipif(not fast.IS_ON, reason="these are copies on write")
def test_tensors_of_an_unwritten_container_are_not_copied() -> None:
    with hookrun.hooked(nn.Identity(), one_hook()) as hooks, Copies() as copies:
        hooks._model((torch.ones(3, WIDTH), [torch.ones(2)]))
    assert copies.count == 0
    assert len(hooks.captures["h"][""]) == 1


FOREIGN: dict[str, Callable[[], Tensor]] = {
    "from NumPy": lambda: torch.from_numpy(np.ones((2, 2), dtype=np.float32)),
    "shared memory": lambda: torch.ones(2, 2).share_memory_(),
    "a parameter": lambda: nn.Parameter(torch.ones(2, 2)),
    "a slice": lambda: torch.ones(4, 4)[1:3, 1:3],
    "expanded": lambda: torch.ones(2, 1).expand(2, 2).clone().t(),
    "conjugate": lambda: torch.ones(2, 2, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.ones(2, 2)),
    "integers": lambda: torch.ones(2, 2, dtype=torch.int64),
    "booleans": lambda: torch.ones(2, 2, dtype=torch.bool),
    "empty": lambda: torch.ones(0, 2),
    "no dimensions": lambda: torch.ones(()),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_capture_keeps_the_value_for_every_kind_of_memory(name: str) -> None:
    tensor = FOREIGN[name]()
    expected = tensor.detach().clone()
    model = nn.Identity()
    with hookrun.hooked(model, one_hook()) as hooks:
        for _ in range(3):
            model(tensor)
        with torch.no_grad():
            tensor.zero_()
        model(tensor)
    found = hooks.captures["h"][""]
    assert_close(found, [expected] * 3 + [torch.zeros_like(expected)])
    for each in found:
        assert not each.requires_grad


@pytest.mark.parametrize("name", ["from NumPy", "a slice", "a parameter"])
def test_a_write_to_a_capture_does_not_change_the_model(name: str) -> None:
    tensor = FOREIGN[name]()
    expected = tensor.detach().clone()
    captured(nn.Identity(), tensor)[0].fill_(7)
    assert_close(tensor.detach(), expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.12, in ReLU
def test_a_captured_sparse_tensor_does_not_follow_later_writes() -> None:
    model = nn.Sequential(nn.ReLU())
    with hookrun.hooked(model, one_hook("0")) as hooks:
        for number in range(4):
            output = model(torch.sparse_coo_tensor([[1]], [float(number)], (2,), check_invariants=False))
            output._values().fill_(-1)
    assert [each.to_dense().tolist() for each in hooks.captures["h"]["0"]] == [[0, x] for x in range(4)]


CAPTURE = one_hook()
Shared = tuple[Tensor, Callable[[], list[float]], Callable[[float], object]]


def shared(
    start: Any, outside: Callable[[Any], Any], tensor: Callable[[Any], Tensor] = lambda start: start
) -> Shared:
    """Two views of what it starts with: a tensor and, exported before it, an array or another tensor."""
    other = outside(start)
    if isinstance(other, Tensor):
        return tensor(start), lambda: other.reshape(-1).tolist(), lambda number: other.fill_(number)
    return tensor(start), lambda: np.asarray(other).reshape(-1).tolist(), lambda number: other.fill(number)


def itself(start: Any) -> Any:
    return start


def squared(tensor: Tensor) -> Tensor:
    return tensor.view(2, 2)


def same_storage(tensor: Tensor) -> Tensor:
    return torch.empty(0).set_(tensor.untyped_storage(), 0, (4,))  # type: ignore[call-overload, no-any-return]


def array(*shape: int) -> Any:
    return np.ones(shape, dtype=np.float32)


def a_mapped_file() -> Shared:
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115 (lives as long as the array)
    file.write(array(4).tobytes())
    file.flush()
    mapped: Any = np.memmap(file.name, dtype=np.float32, mode="r+")
    storage = torch.UntypedStorage.from_file(file.name, True, 16)
    tensor = torch.empty(0).set_(storage, 0, (4,))  # type: ignore[call-overload]
    return tensor, lambda: [float(number) for number in mapped], lambda number: mapped.fill(number)


def loaded_weights() -> Tensor:
    with tempfile.NamedTemporaryFile() as file:
        save_file({"w": torch.ones(4)}, file.name)
        return load_file(file.name)["w"]


def numbers_of(memory: bytearray) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.float32)


SHARED: dict[str, Callable[[], Shared]] = {
    "from NumPy": lambda: shared(array(4), itself, torch.from_numpy),
    "a slice of NumPy": lambda: shared(array(4, 4), lambda a: a[1], lambda a: torch.from_numpy(a)[1]),
    "to NumPy": lambda: shared(torch.ones(4), Tensor.numpy),
    "to NumPy through a view": lambda: shared(torch.ones(4), lambda t: t.detach().numpy(), squared),
    "transposed to NumPy": lambda: shared(torch.ones(2, 2), Tensor.numpy, Tensor.t),
    "NumPy of complex": lambda: shared(
        torch.full((2,), 1 + 1j, dtype=torch.complex64),
        lambda t: t.numpy().view(np.float32),
        torch.view_as_real,
    ),
    "exported by DLPack": lambda: shared(torch.ones(4), np.from_dlpack),
    "exported by DLPack, detached": lambda: shared(
        torch.ones(4, requires_grad=True) * 1, lambda t: np.from_dlpack(t.detach())
    ),
    "exported by DLPack before it required a gradient": lambda: shared(
        torch.ones(4), np.from_dlpack, lambda t: t.requires_grad_()
    ),
    "a view of what DLPack exported": lambda: shared(torch.ones(4), np.from_dlpack, squared),
    "exported as a capsule": lambda: shared(torch.ones(4), lambda t: dlpack.from_dlpack(dlpack.to_dlpack(t))),
    "imported by DLPack": lambda: shared(torch.ones(4), itself, torch.from_dlpack),
    "loaded weights": lambda: shared(loaded_weights(), squared),
    "a buffer": lambda: shared(
        bytearray(array(4).tobytes()), lambda memory: np.frombuffer(memory, np.float32), numbers_of
    ),
    "a mapped file": a_mapped_file,
    "processes": lambda: shared(torch.ones(4).share_memory_(), same_storage),
    "a view": lambda: shared(torch.ones(4), squared),
    "a base": lambda: shared(torch.ones(4, 2), lambda t: t[:2].view(-1), lambda t: t[:2]),
    "detached": lambda: shared(torch.ones(4), Tensor.detach),
    "the same storage": lambda: shared(torch.ones(4), same_storage),
    "expanded": lambda: shared(array(1), itself, lambda a: torch.from_numpy(a).expand(4)),
}
OBSERVERS: dict[str, dict[str, Any]] = {
    "capture": CAPTURE,
    "its arguments": one_hook("", "forward_pre"),
    "a member": one_hook(target="[0]"),
    "in a container": CAPTURE,
    "a part": one_hook(index="..., :"),
    "the shape's budget": one_hook(max_bytes=10**6),
    "stats": one_hook("", "forward", "stats"),
}


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("memory", SHARED)
@pytest.mark.parametrize("times", [1, 3])
def test_tensors_share_memory_after_an_observer_as_before(memory: str, observer: str, times: int) -> None:
    tensor, outside, fill = SHARED[memory]()
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
        assert set(outside()) == {3.0}, "a write to the tensor must reach what is on the same memory"
        fill(5)
        assert set(tensor.detach().reshape(-1).tolist()) == {5.0}, "and the other way round"


WRITES = [(memory, "outside") for memory in SHARED]
WRITES += [(memory, "tensor") for memory in SHARED if memory != "expanded"]  # torch refuses to write to it


@pytest.mark.parametrize("hook", ["forward", "forward_pre"])
@pytest.mark.parametrize(("memory", "by"), WRITES)
def test_a_capture_does_not_follow_later_writes(memory: str, by: str, hook: str) -> None:
    tensor, _, fill = SHARED[memory]()
    model = nn.Identity()
    with hookrun.hooked(model, one_hook("", hook)) as hooks, torch.no_grad():
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
def test_an_exported_array_shares_memory_with_its_tensor(name: str) -> None:
    tensor = torch.ones(4)
    model = nn.Identity()
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


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_observer_leaves_the_array_connected(mode: Any) -> None:
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


class Sub(Tensor):
    """A user's subclass of Tensor."""


LAYOUTS: dict[str, Callable[[], Tensor]] = {
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
@pytest.mark.parametrize("kind", LAYOUTS)
def test_captured_tensors_keep_their_kind(kind: str, budget: int | None) -> None:
    tensor = LAYOUTS[kind]()
    limit = {} if budget is None or kind == "mkldnn" else {"max_bytes": budget}
    alone, (inside,) = captured(nn.Identity(), tensor, [tensor], **limit)
    for kept in (alone, inside):
        assert type(kept) is type(tensor)
        assert kept.layout == tensor.layout
        assert kept is not tensor
        assert kept.dtype == tensor.dtype
        assert kept.device == tensor.device


FEATURES = 8
LENGTH = 200
BATCH = 4


def kept_bytes(value: Any) -> int:
    """The bytes of the storages of a captured value."""
    storages = dict[int, int]()
    for tensor in held(value):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


PARTS: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any], int]] = {
    "the first token": (lambda x: x[:, 0], {}, BATCH * FEATURES),
    "within a tuple": (lambda x: (x[:, 0], None), {}, BATCH * FEATURES),
    "index": (lambda x: x * 1, {"index": ":, 0"}, BATCH * FEATURES),
    "index with a list": (lambda x: x * 1, {"index": "..., [3, 1]"}, BATCH * LENGTH * 2),
    "index within a tuple": (lambda x: (x * 1,), {"index": ":, 0"}, BATCH * FEATURES),
    "target": (lambda x: {"a": x[:, 0], "b": x}, {"target": "a"}, BATCH * FEATURES),
    "target and index": (lambda x: {"a": x * 1}, {"target": "a", "index": "..., 0"}, BATCH * LENGTH),
    "one chunk": (lambda x: x.chunk(4, dim=-1)[0], {}, BATCH * LENGTH * FEATURES // 4),
    "the largest": (lambda x: x * 1, {"reduce": {"topk": 1}}, 3 * BATCH * LENGTH),  # indices take two
    "a mean over nothing": (lambda x: x[:, 0, 0], {"reduce": "mean"}, BATCH),
    "another dtype that is its own": (lambda x: x[:, 0], {"dtype": "float32"}, BATCH * FEATURES),
    "real of complex": (lambda x: torch.complex(x, x).real, {}, BATCH * LENGTH * FEATURES),
    "transposed": (lambda x: (x * 1).transpose(0, 1), {}, BATCH * LENGTH * FEATURES),
}
if fast.IS_ON:  # only a copy on write shares the memory of the expanded tensor
    PARTS["expanded"] = (lambda x: (x[:1, :1] * 1).expand(BATCH, LENGTH, FEATURES), {}, FEATURES)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", PARTS)
def test_a_captured_part_holds_the_memory_of_that_part_only(name: str, mode: Any) -> None:
    make, keys, elements = PARTS[name]
    x = torch.rand(BATCH, LENGTH, FEATURES)
    with mode():
        entries = captured(Net(lambda _, x: make(x)), x, x, x, **keys)
    assert [kept_bytes(kept) for kept in entries] == [4 * elements] * 3


@pytest.mark.parametrize("name", ["the first token", *(["expanded"] if fast.IS_ON else [])])
def test_max_bytes_counts_the_memory_of_captured_parts(name: str) -> None:
    make, _, elements = PARTS[name]
    inputs = [torch.rand(BATCH, LENGTH, FEATURES) for _ in range(8)]
    kept = captured(Net(lambda _, x: make(x)), *inputs, max_bytes=5 * 4 * elements)
    assert [kept_bytes(part) for part in kept] == [4 * elements] * 5


@pytest.mark.parametrize(
    ("limit", "rows"), [(3, 0), (4, 1), (7, 1), (11, 2), (16, 4), (23, 5), (64, 16), (1000, 20)]
)
def test_a_batch_beyond_max_bytes_is_cut_at_the_row(limit: int, rows: int) -> None:
    batches = torch.arange(20 * 4.0).reshape(5, 4, 4)
    kept = captured(nn.Identity(), *batches, max_bytes=limit * 4)
    assert torch.equal(torch.cat([torch.empty(0, 4), *kept]), batches.flatten(0, 1)[:rows])
    assert sum(map(kept_bytes, kept)) <= limit * 4


def test_all_tensors_of_a_container_are_cut_at_the_same_row() -> None:
    model = Net(lambda _, x: (x, {"pooled": x[:, 0]}))
    inputs = [torch.full((4, 3), float(number)) for number in range(3)]
    (kept,) = captured(model, *inputs, max_bytes=3 * 4 * (3 + 1) + 5)
    assert kept[0].shape == (3, 3)
    assert kept[1]["pooled"].shape == (3,)


@pytest.mark.parametrize(
    "make", [lambda x: (x, x.sum()), lambda x: (x, x[:2]), lambda x: x.sum(), lambda x: x.to_sparse()]
)
def test_a_value_without_batch_rows_is_kept_whole_or_not_at_all(make: Callable[[Tensor], Any]) -> None:
    model = Net(lambda _, x: make(x))
    with hookrun.hooked(model, one_hook(max_bytes=2)) as hooks:
        model(torch.ones(4, 3))
    assert hooks.captures["h"][""] == []
    assert hooks.records[0]["spent"] == 2


def test_a_parameter_gradient_is_not_cut_at_a_row() -> None:
    model = nn.Linear(4, 4)
    with hookrun.hooked(model, one_hook("weight", "grad", max_bytes=32)) as hooks:
        model(torch.ones(2, 4)).sum().backward()
    assert hooks.captures["h"]["weight"] == []


def test_rows_on_disk_keep_their_sample_ids(tmp_path: Any) -> None:
    model = nn.Identity()
    with hookrun.record(model, one_hook(max_bytes=400), tmp_path / "run") as hooks:
        for start in (50, 0):
            hooks.samples = range(start, start + 50)
            model(torch.ones(50, 10))
    found = hookrun.open_run(tmp_path / "run")
    kept = found.captures["h"][""]
    assert kept.sample_ids.tolist() == list(range(50, 60))
    assert kept[:].shape == (10, 10)
    assert [line["spent"] for line in found.stats] == [400]


@pytest.mark.parametrize("keep", [{"every": 2}, {"reservoir": 6}], ids=str)
def test_max_bytes_cuts_after_keep_has_chosen_samples(keep: dict[str, int]) -> None:
    model = nn.Identity()
    with hookrun.hooked(model, one_hook(max_bytes=3 * 4, keep=keep)) as hooks:
        hooks.population, hooks.samples = 12, range(12)
        for _ in range(2):
            model(torch.arange(12.0).reshape(12, 1))
    (kept,) = hooks.captures["h"][""]
    assert kept.shape == (3, 1)
    assert "reservoir" in keep or kept.flatten().tolist() == [0.0, 2.0, 4.0]


class Late(nn.Module):
    """Runs its layers, then writes to the output of one of them."""

    def __init__(self, layers: list[nn.Module], late: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        kept = None
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.late:
                kept = x
        total = x * 1
        if kept is not None:
            with torch.no_grad():
                kept.detach().fill_(9)
        return total


def random_model(seed: int) -> nn.Module:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    make: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Hardtanh(inplace=True),
        lambda: nn.Dropout(0.3, inplace=True),
        lambda: nn.Identity(),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.Flatten(),
        *[lambda: Net(draw.choice(WRITERS))] * 2,
    ]
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    layers += [draw.choice(make)() for _ in range(draw.randint(2, 7))]
    return Late(layers, draw.randint(-1, len(layers) - 1)).train(draw.random() < 0.5)


def by_hand(model: nn.Module, run: Callable[[], object]) -> dict[str, dict[str, list[Tensor]]]:
    """The values that hand-written hooks clone."""
    seen: dict[str, dict[str, list[Tensor]]] = {"out": defaultdict(list), "pre": defaultdict(list)}
    handles = list[Any]()
    for path, module in model.named_modules():
        if module._modules:
            continue
        pre = seen["pre"][path]
        out = seen["out"][path]
        handles += [
            module.register_forward_pre_hook(lambda _m, args, pre=pre: pre.append(args[0].detach().clone())),
            module.register_forward_hook(lambda _m, _a, y, out=out: out.append(y.detach().clone())),
        ]
    run()
    for handle in handles:
        handle.remove()
    return seen
