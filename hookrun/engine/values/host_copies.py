"""Copies of an accelerator's tensors in memory of the host, made while the program and the device go on."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hookrun.engine.values.tensors import ordinary_tensors
from hookrun.errors import HookrunWarning, reason

MOST_HELD = 2**26
"""The most bytes of a device's memory that wait to be copied. A larger tensor waits for all others."""


@dataclass(eq=False, slots=True)
class UnderWay:
    """A copy that a device makes.

    source: what is copied; None: the copy is complete
    size:   of the source in bytes
    ended:  the event of the device behind the copy
    """

    source: Tensor | None
    size: int
    ended: Any

    def wait(self) -> None:
        """Wait until the copy is complete. RuntimeError if the device has failed."""
        if not self.is_complete():
            self.ended.synchronize()
            self.source = None

    def is_complete(self) -> bool:
        """Whether `wait` would return at once."""
        if self.source is not None and self.ended.query():
            self.source = None
        return self.source is None


@dataclass(eq=False, slots=True)
class HostCopy:
    """A copy of a tensor in memory of the host.

    tensor:    the copy, complete once `wait` has returned
    under_way: None: it was complete from the beginning
    """

    tensor: Tensor
    under_way: UnderWay | None = None

    def wait(self) -> Tensor:
        """Wait until the copy is complete, and return it. RuntimeError if the device has failed."""
        if self.under_way is not None:
            self.under_way.wait()
        return self.tensor


class HostCopies:
    """Copies tensors of one device on a stream of its own, in order.

    A copy has the content of the moment at which it was begun: the tensor is cloned on the current stream, where an
    operation that changes it in place comes later. Without a clone the current stream would have to wait for the copy,
    which takes some twenty times longer. A clone lives until its copy is complete; each new copy looks at the others.

    AttributeError or RuntimeError if the device has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._device = device
        self._stream = module.Stream(device)
        self._using, self._current = module.stream, module.current_stream
        self._event = module.Event
        self._begun = deque[UnderWay]()
        self._held = 0
        self._lock = Lock()

    def begin(self, tensor: Tensor, memory: Tensor | None = None) -> HostCopy:
        """Begin to copy a tensor.

        memory: [bytes of the tensor] uint8 of `host_memory`, where it is laid contiguously; by default new memory,
                where it keeps its strides
        """
        with self._lock:
            self._make_room(tensor.nbytes)
            layout = torch.preserve_format if memory is None else torch.contiguous_format
            clone = tensor.detach().clone(memory_format=layout)
            if memory is None:
                memory = host_memory(tensor.nbytes)
            self._stream.wait_stream(self._current(self._device))
            with ordinary_tensors(), self._using(self._stream):
                target = memory.view(clone.dtype).as_strided(clone.shape, clone.stride())
                target.copy_(clone, non_blocking=True)
            ended = self._event()
            ended.record(self._stream)
            under_way = UnderWay(clone, clone.nbytes, ended)
            self._begun.append(under_way)
            self._held += under_way.size
            return HostCopy(target, under_way)

    def _make_room(self, size: int) -> None:
        """Release the clones of complete copies, and wait for the oldest ones while there is no room."""
        while self._begun and (self._held + size > MOST_HELD or self._begun[0].is_complete()):
            oldest = self._begun.popleft()
            self._held -= oldest.size
            oldest.wait()


def copies_of(tensor: Tensor) -> HostCopies | None:
    """What copies the tensor without waiting; None if it has to be copied at once, such as a tensor on the CPU."""
    if tensor.is_cpu or type(tensor) not in (Tensor, Parameter):
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return None
    return _copies_on(tensor.device)


def copy_to_host(tensor: Tensor) -> HostCopy:
    """A copy of the tensor with its strides; that of an accelerator's tensor is only begun."""
    copies = copies_of(tensor)
    return HostCopy(tensor.detach().to("cpu", copy=True)) if copies is None else copies.begin(tensor)


def host_memory(size: int) -> Tensor:
    """Pinned memory: [size] uint8 without content.

    Where no memory can be pinned it is ordinary memory, to which copies wait for the device; a warning says so once.
    """
    with ordinary_tensors():
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _tell_waiting(reason(error))
            return torch.empty(size, dtype=torch.uint8, device="cpu")


@cache
def _copies_on(device: torch.device) -> HostCopies | None:
    try:
        return HostCopies(device)
    except (AttributeError, RuntimeError) as error:  # a device without streams
        _tell_waiting(reason(error))
        return None


@cache
def _tell_waiting(why: str) -> None:
    warnings.warn(
        f"copies from the device to the host wait for the device: {why}", HookrunWarning, stacklevel=2
    )
