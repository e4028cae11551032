"""A second device for machines without a GPU: tensors of device `second`, computed by the CPU, that behave as CUDA's.

It finds what tests on the CPU cannot: a mask or generator on the wrong device, values that were never moved, `.numpy()`
of a device's tensor, a copy read before it has arrived, waits in a hot path, rows that stay in the device's memory.

    import second_device; second_device.install()       # once per process, before the code under test is imported
    model.to("second")
    with second_device.watch() as seen: model(x.to("second"))
    assert not seen.waits, seen                         # (what, "file.py:12") of everything that stopped the host
    second_device.allocated(), second_device.peak()     # bytes of living storages

For another process, `autoload(folder)` writes what makes `import torch` install it; put the folder on PYTHONPATH. Then
`hookrun compute.device=second` works, and `auto` chooses it. With SECOND_DEVICE_LOG=FILE that process appends each
wait, upload and late copy as `kind<TAB>what<TAB>where` when it ends.

As on CUDA: operators refuse tensors of the CPU, except one [] tensor where TensorIterator allows it (arithmetic and
comparison of two, not clamp, cat, stack), indices of x[i], and copies. Generators of the CPU are refused. A copy to the
host with non_blocking=True goes to pinned memory and arrives late: until an event or stream of this device is waited
for, or any other wait, the host's tensor holds bytes 0xA5. If it was begun on a stream that is not the current one by
itself (`with torch.second.stream(side)`), it gets what the source holds when it arrives, and never arrives if the
source's memory was released before. Seeds give other numbers than on the CPU. GradScaler,
autocast, fused and foreach optimizers, pinned memory, torch.save and torch.load, deepcopy, float64 and complex work.

Not as on CUDA: one device only (autograd allows a Python backend no second index); kernels run at once and in order
(no races between streams); no Inductor, CUDA graphs, NCCL, memory limit; a generator of this device is accepted by
operators of the CPU; numbers are the CPU's up to rounding (1e-6), since some operators take other kernels; an exception
in a hook on a tensor of a backward pass ends the process. Written with torch 2.14; older versions were not tried.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

NAME = "second"
CPU = torch.device("cpu")
aten = torch.ops.aten
ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__["AutocastPrivateUse1"])


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


INDEXED = _names("index _unsafe_index index_put index_put_ _index_put_impl_ _unsafe_index_put")
"""Operators that take indices of the CPU."""

SCALARS = _names(
    """
    add sub rsub mul div floor_divide true_divide pow fmod remainder maximum minimum fmax fmin atan2 copysign hypot
    xlogy logaddexp logaddexp2 nextafter eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_xor heaviside gcd lcm where masked_fill fill lerp float_power
    """
)
"""Operators that take one [] tensor of the CPU."""

WAITS = _names(
    """
    _local_scalar_dense nonzero masked_select equal _unique2 unique_consecutive unique_dim repeat_interleave bincount
    is_nonzero histc _linalg_check_errors
    """
)
"""Operators whose result, or its shape, the host has to know."""

HALF = _names(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d matmul mm bmm mv linear addmm addmv addbmm
    baddbmm einsum scaled_dot_product_attention prelu
    """
)
"""Operators that autocast runs in half precision."""

FULL = _names(
    """
    exp log log2 log10 log1p pow rsqrt softplus cumsum cumprod sum prod norm layer_norm group_norm softmax log_softmax
    nll_loss cross_entropy_loss mse_loss smooth_l1_loss kl_div cosine_similarity dist renorm
    """
)
"""Operators that autocast runs in float32."""

FACTORIES = _names("empty empty_like empty_strided zeros zeros_like ones full rand randn")
"""Functions of torch that take `pin_memory`."""

_libs: list[Any] = []
_logs: list[Seen] = []
_late: deque[tuple[Tensor, Tensor, StorageWeakRef | None]] = deque()
"""Target, source, and the memory of a source that is read late."""
_aside: list[Stream] = []
"""The streams of open `with torch.second.stream(…)`."""
_order = threading.RLock()
"""Copies arrive one after the other, also if several threads wait."""
"""(tensor of the host, its value) of each copy under way."""
_held: dict[int, tuple[StorageWeakRef, Any]] = {}
"""Address -> the device's storage there, and the storage of the CPU whose memory it is."""
_pinned: dict[int, StorageWeakRef] = {}
_generators: dict[int, Generator] = {}
_live = {"bytes": 0, "peak": 0, "new": 0}
_default: Generator


class Seen(list[tuple[str, str, str]]):
    """The events (kind, what, where) of a `watch`.

    kinds: wait; upload, a copy from pageable memory or a blocking one; late, a copy to the host that arrives later
    """

    @property
    def waits(self) -> list[tuple[str, str]]:
        """(what, where) of each wait of the host."""
        return self._of("wait")

    @property
    def uploads(self) -> list[tuple[str, str]]:
        """(what, where) of each copy to the device for which the host waits."""
        return self._of("upload")

    def _of(self, wanted: str) -> list[tuple[str, str]]:
        return [(what, where) for kind, what, where in self if kind == wanted]

    def __repr__(self) -> str:
        counts = Counter(self).most_common()
        return "\n".join(f"{n} x {kind} {what} at {where}" for (kind, what, where), n in counts)


@contextmanager
def watch() -> Iterator[Seen]:
    """Collects the block's waits, uploads and late copies."""
    seen = Seen()
    _logs.append(seen)
    yield seen
    _logs[:] = [log for log in _logs if log is not seen]


INNER = (str(Path(torch.__file__).parent), __file__, "<frozen", os.__file__[:-5] + "contextlib")
"""Where the files begin that are not the place of an event."""


def _tell(kind: str, what: str) -> None:
    if not _logs:
        return
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(INNER):
        frame = frame.f_back
    where = f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"
    for log in _logs:
        log.append((kind, what, where))


def _arrive(count: int | None = None, told: str | None = None) -> None:
    """The oldest copies to the host arrive, by default all. told: why the host waits."""
    if told:
        _tell("wait", told)
    with _order, torch.inference_mode():  # it may write to tensors that were made in this mode
        for _ in range(len(_late) if count is None else count):
            target, value, memory = _late.popleft()
            if memory is None or not memory.expired():
                target.copy_(value)


# Memory: a storage of this device is a second name for the memory of a storage of the CPU, held while it lives.
def allocated() -> int:
    """Bytes of the device's living storages."""
    for address in [address for address, (ref, _) in _held.items() if ref.expired()]:
        _live["bytes"] -= _held.pop(address)[1].nbytes()
    _live["new"] = 0
    return _live["bytes"]


def peak(reset: bool = False) -> int:
    """The most bytes that lived at once since the last reset; what dies is noted after 64 allocations at the latest."""
    now = allocated()
    highest = max(_live["peak"], now)
    _live["peak"] = now if reset else highest
    return highest


def _storage(host: Any) -> Any:
    """A storage of the device in the memory of one of the CPU."""
    address = host.data_ptr()
    made = torch._C._construct_storage_from_data_pointer(address, torch.device(NAME, 0), host.nbytes())
    _live["new"] += 1
    if host.nbytes():
        before = _held[address][1].nbytes() if address in _held else 0
        _live["bytes"] += host.nbytes() - before
        _held[address] = StorageWeakRef(made), host
    if _live["new"] > 64 or _live["bytes"] > _live["peak"]:
        _live["peak"] = max(_live["peak"], allocated())
    return made


def _set(tensor: Tensor, storage: Any, like: Tensor) -> Any:
    form = like.storage_offset(), like.size(), like.stride()
    return aten.set_.source_Storage_storage_offset.redispatch(ON_CPU, tensor, storage, *form)


def _wrapped(value: Tensor, own: Sequence[Tensor] = ()) -> Any:
    """A result of the CPU as a tensor of this device, in the storage of the argument whose memory it has."""
    address = value.untyped_storage().data_ptr()
    storage = None
    for tensor in own:
        if address and storage is None and tensor.untyped_storage().data_ptr() == address:
            storage = tensor.untyped_storage()
    if storage is None:
        storage = _storage(value.untyped_storage())
    return _set(torch._C._acc.create_empty_tensor((0,), value.dtype), storage, value)


def _host(tensor: Tensor) -> Tensor:
    """A tensor of the CPU over the same memory."""
    mine = tensor.untyped_storage()
    storage: Any = torch._C._construct_storage_from_data_pointer(mine.data_ptr(), CPU, mine.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=CPU)
    out = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_neg():
        return torch._neg_view(out)
    return out.conj() if tensor.is_conj() else out


def _here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


# Operators
def _check(op: Any, name: str, tensors: list[Tensor]) -> None:
    """RuntimeError if tensors of the CPU are among those that the device has to read."""
    strange = [tensor for tensor in tensors if not _here(tensor)]
    if not strange or (name in INDEXED and _here(tensors[0])):
        for _ in strange:
            _tell("upload", f"{name} by an index of the CPU")
        return
    takes_scalar = name.removeprefix("_foreach_").rstrip("_") in SCALARS
    if len(strange) > 1 or strange[0].dim() or not takes_scalar:
        found = " and ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {found} (when calling {op})"
        )


def _is_waited_for(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the host has to know the operator's result: also of an index by a mask."""
    if name in WAITS:
        return True
    masks = (torch.bool, torch.uint8)
    return name in INDEXED and any(getattr(index, "dtype", None) in masks for index in args[1])


def _with_tensors(schema: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with tensors where torch gives a number for one, as in `x % 2`."""
    found = list(args)
    for place, (value, argument) in enumerate(zip(args, schema.arguments, strict=False)):
        if isinstance(value, int | float | complex) and str(argument.type) == "Tensor":
            found[place] = torch.tensor(value, device=CPU)
    return tuple(found)


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: the CPU's, over the same memory."""
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    if name == "set_" or views:
        return op.redispatch(ON_CPU, *args, **kwargs)  # only metadata
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    _check(op, name, tensors)
    if _is_waited_for(name, args):
        _arrive(told=name)
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments)
    own = [tensor for tensor in tensors if _here(tensor)]
    host = dict[int, Tensor]()
    for tensor in own:
        value = _host(tensor)
        host[id(tensor)] = torch.empty_like(value) if writes and not tensor.numel() else value
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, _Own)]
    if given and given[0]._cdata not in _generators:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")

    def away(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == NAME:
            return CPU
        return host.get(id(value), value)

    args, kwargs = tree_map(away, (_with_tensors(schema, args), kwargs))
    kwargs.pop("pin_memory", None)
    draws = torch.Tag.nondeterministic_seeded in op.tags and not given
    with _drawing() if draws else nullcontext():
        out = op(*args, **kwargs)
    for tensor in own:
        value = host[id(tensor)]
        if (tensor.shape, tensor.stride()) != (value.shape, value.stride()):  # it was resized
            value = value.clone()
            host[id(tensor)] = value
            _set(tensor, _storage(value.untyped_storage()), value)
    same = {id(host[id(tensor)]): tensor for tensor in own}

    def back(value: Tensor) -> Any:
        return same[id(value)] if id(value) in same else _wrapped(value, own)

    return tree_map_only(Tensor, back, out)


@contextmanager
def _drawing() -> Iterator[None]:
    """Operators without a generator draw from this device's own."""
    kept = torch.default_generator.get_state()
    torch.default_generator.set_state(_default.get_state())
    yield
    _default.set_state(torch.default_generator.get_state())
    torch.default_generator.set_state(kept)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if _here(target):
        if not _here(source) and not (non_blocking and _is_pinned(source)):
            _tell("upload", "from pageable memory" if non_blocking else "a blocking copy")
        _host(target).copy_(_host(source) if _here(source) else source)
    elif non_blocking and _is_pinned(target):
        _tell("late", "a copy to the host")
        with _order:
            if _aside:
                _late.append((target.detach(), _host(source), StorageWeakRef(source.untyped_storage())))
            else:
                _late.append((target.detach(), _host(source).clone(), None))
            if target.is_contiguous():
                target.detach().unsqueeze(0).view(torch.uint8).fill_(0xA5)
    else:
        _arrive(told="a copy to the host")
        target.copy_(_host(source))
    return target


def _to_copy(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Any:
    value = _host(x) if _here(x) else x
    device = device or x.device
    if device.type == NAME and _here(x):
        form = memory_format or torch.preserve_format
        return _wrapped(aten._to_copy(value, dtype=dtype, memory_format=form))
    out = torch.empty_like(
        value,
        dtype=dtype or x.dtype,
        memory_format=memory_format or torch.preserve_format,
        device="meta" if device.type == "meta" else CPU,
    )
    if device.type == "meta":
        return out
    if device.type == NAME:
        out = _wrapped(out)
    elif non_blocking:
        out = _pin(out)
    return _copy(out, x, non_blocking)


def _is_pinned(x: Tensor, device: Any = None) -> bool:
    ref = _pinned.get(x.untyped_storage().data_ptr())
    return ref is not None and not ref.expired()


def _pin(x: Tensor, device: Any = None) -> Tensor:
    if not _is_pinned(x):
        x = x.clone()
        for old in [address for address, ref in _pinned.items() if ref.expired()]:
            del _pinned[old]
        _pinned[x.untyped_storage().data_ptr()] = StorageWeakRef(x.untyped_storage())
    return x


def _with_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        out = make(*args, **kwargs)
        return _pin(out) if pin_memory else out

    return made


def _convolution(*args: Any) -> Any:
    return _wrapped(aten.convolution(*tree_map_only(Tensor, _host, args)))


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    found = aten.convolution_backward(_host(grad), _host(x), _host(weight), [grad.shape[1]], *rest)
    return tuple(None if value is None else _wrapped(value) for value in found)


def _recurrent(name: str, *args: Any) -> Any:
    from torch._decomp import decomposition_table

    return decomposition_table[getattr(aten, name).input](*args)


def _cast(op: Any, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    to = dtype or torch.get_autocast_dtype(NAME)

    def fits(value: Tensor) -> Tensor:
        casts = _here(value) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(to) if casts else value

    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return op(*tree_map_only(Tensor, fits, args), **tree_map_only(Tensor, fits, kwargs))


# torch.second
_Own: Any = torch._C.Generator  # its type leaves out what is used here


class Generator(_Own):  # type: ignore[misc]
    """torch.Generator, also for this device."""

    seeded: int

    def __new__(cls, device: Any = "cpu") -> Self:
        here = torch.device(device).type == NAME
        self: Self = super().__new__(cls, CPU if here else device)
        if here:
            _generators[self._cdata] = self
            self.manual_seed(torch.initial_seed())
        return self

    @property
    def device(self) -> torch.device:
        """The device on which operators draw with it."""
        own: torch.device = _Own.device.__get__(self)
        return torch.device(NAME, 0) if self._cdata in _generators else own

    def manual_seed(self, seed: int) -> Self:
        """Another sequence of numbers than the CPU's from the same seed."""
        super().manual_seed((seed ^ 0x5EC0D) if self._cdata in _generators else seed)
        self.seeded = seed
        return self

    def initial_seed(self) -> int:
        """The last seed."""
        own: int = super().initial_seed()
        return self.seeded if self._cdata in _generators else own


class Stream:
    """All work is in order. Also the context managers of `torch.second`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._of: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        """The device of the stream."""
        return torch.device(NAME, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *given: object) -> None:
        return None

    def wait_stream(self, stream: Any = None) -> None:
        """Nothing: work is in order."""

    def wait_event(self, event: Any = None) -> None:
        """Nothing: work is in order."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind the copies that are under way."""
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        """Wait for all copies."""
        _arrive(told="Stream.synchronize")

    def query(self) -> bool:
        """Whether no copy is under way."""
        return not _late


class Event(Stream):
    """Knows the copies that were under way when it was recorded; each `query` lets one of them arrive."""

    def wait(self, stream: Any = None) -> None:
        """The device waits, not the host: what it reads of the host's memory afterwards has arrived."""
        with _order:
            _arrive(self._count())

    def elapsed_time(self, other: Any) -> float:
        """0 ms."""
        return 0.0

    def record(self, stream: Any = None) -> Self:
        """Note the copies that are under way."""
        with _order:
            self._of = [target for target, *_ in _late]
        return self

    def _count(self) -> int:
        """How many of the oldest copies have to arrive until all of its own have."""
        count = 0
        for number, (target, *_) in enumerate(_late, 1):
            if any(target is mine for mine in self._of):
                count = number
        return count

    def query(self) -> bool:
        """Whether its copies have arrived."""
        with _order:
            _arrive(min(1, self._count()))
            return not self._count()

    def synchronize(self) -> None:
        """Wait for its copies."""
        with _order:
            _arrive(self._count(), told="Event.synchronize")
            self._of = []


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    _aside.append(stream)
    yield
    _aside.pop()


def _module() -> types.SimpleNamespace:
    one = Stream()
    return types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        device_count=lambda: 1,
        Event=Event,
        current_device=lambda: 0,
        set_device=lambda device: None,
        _is_in_bad_fork=lambda: False,
        Stream=Stream,
        device=Stream,
        manual_seed=lambda seed: _default.manual_seed(seed),
        manual_seed_all=lambda seed: _default.manual_seed(seed),
        get_rng_state=lambda device=NAME: _default.get_state(),
        get_rng_state_all=lambda: [_default.get_state()],
        set_rng_state=lambda state, device=NAME: _default.set_state(state),
        initial_seed=lambda: _default.initial_seed(),
        set_rng_state_all=lambda states: _default.set_state(states[0]),
        empty_cache=lambda: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda: True,
        get_device_name=lambda device=None: "a second device",
        synchronize=lambda device=None: _arrive(told="synchronize"),
        memory_allocated=lambda device=None: allocated(),
        max_memory_allocated=lambda device=None: peak(),
        reset_peak_memory_stats=lambda device=None: peak(reset=True),
        current_stream=lambda device=None: one,
        default_stream=lambda device=None: one,
        stream=_on_stream,
    )


def install() -> None:
    """Registers the device, once per process."""
    global _default
    if _libs:
        return
    from torch.utils import backend_registration as known

    module = _module()
    hook = known._DummyPrivateUse1Hook()
    guard = known._DummyDeviceGuard()
    every = torch.library.Library("_", "IMPL")
    ours = torch.library.Library("aten", "IMPL")
    _libs.extend((every, ours, hook, guard))
    known._setup_privateuseone_for_python_backend(NAME, module, hook, guard)
    torch.Generator = Generator  # type: ignore[misc]
    _default = Generator(NAME)
    module.default_generators = (_default,)
    every.fallback(_kernel, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _register_kernels(ours)
    _register_casts(ours)
    for name in FACTORIES:
        setattr(torch, name, _with_pinning(getattr(torch, name)))
    torch.UntypedStorage.to = _moving(torch.UntypedStorage.to)  # type: ignore[method-assign]


def _register_kernels(ours: torch.library.Library) -> None:
    def away(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return _copy(target, source, non_blocking)

    kernels: dict[str, Callable[..., Any]] = {
        "copy_": _copy,
        "_copy_from": away,
        "_to_copy": _to_copy,
        "convolution_overrideable": _convolution,
        "convolution_backward_overrideable": _convolution_backward,
    }
    for name, kernel in kernels.items():
        ours.impl(name, kernel, "PrivateUse1")
    for name in ("lstm", "gru"):
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            ours.impl(f"{name}.input", functools.partial(_recurrent, name), key)
    ours.impl("_pin_memory", _pin, "CPU")
    ours.impl("is_pinned", _is_pinned, "CPU")


def _register_casts(ours: torch.library.Library) -> None:
    for name in HALF + FULL:
        dtype = torch.float32 if name in FULL else None
        for overload in getattr(aten, name).overloads():
            op = getattr(getattr(aten, name), overload)
            if "out" not in overload and "Dimname" not in str(op._schema):
                ours.impl(op.name(), functools.partial(_cast, op, dtype), "AutocastPrivateUse1")


def _moving(to: Callable[..., Any]) -> Callable[..., Any]:
    """`UntypedStorage.to`, also to this device, for which torch has no allocator."""

    def moved(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type == NAME != self.device.type:
            return torch.empty(0, dtype=torch.uint8, device=CPU).set_(self).to(NAME).untyped_storage()
        return to(self, device=device, non_blocking=non_blocking)

    return moved


def autoload(folder: str | os.PathLike[str]) -> None:
    """Makes `import torch` install the device in processes with the folder on PYTHONPATH; this file is copied there."""
    info = Path(folder) / "second_device-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second_device\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nsecond = second_device:install\n")
    (Path(folder) / "second_device.py").write_bytes(Path(__file__).read_bytes())


def _log_everything(path: str) -> None:
    """Append the events of the whole process to a file when the process ends."""
    seen = Seen()
    _logs.append(seen)

    def written() -> None:
        with open(path, "a") as file:
            file.writelines("\t".join(event) + "\n" for event in seen)

    atexit.register(written)


if "SECOND_DEVICE_LOG" in os.environ:
    _log_everything(os.environ["SECOND_DEVICE_LOG"])
