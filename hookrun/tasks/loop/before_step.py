"""What a training step changes beside the parameters, as it was before the step: generators, buffers, hooks' draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hookrun.runtime import Installation
from hookrun.tasks.loop.finite import not_finite


@dataclass(slots=True)
class _BufferBefore:
    """One buffer of a module.

    version: of `tensor` when `copy` was made; None: it is written without leaving a new version
    """

    path: str
    module: nn.Module
    name: str
    tensor: Tensor | None = None
    version: int | None = None
    copy: Tensor | None = None

    def copy_changed(self) -> bool:
        """Whether the buffer may differ from its copy; a tensor of another form is copied at once."""
        now = self.module._buffers.get(self.name)
        if now is None:
            self.tensor = self.copy = None
            return False
        untold = isinstance(self.module, _NormBase) or now.is_inference()  # torch counts no version there
        version = None if untold else now._version
        if now is self.tensor and version is not None and version == self.version:
            return False
        self.tensor, self.version = now, version
        if self.copy is None or self.copy.shape != now.shape or self.copy.dtype != now.dtype:
            self.copy = now.detach().clone()
            return False
        return True


class BeforeStep:
    """The state that a step begins with. Taken before each step, so that a step can be computed once more."""

    def __init__(
        self, model: nn.Module, hooks: Installation, device: torch.device, *, own_code: bool
    ) -> None:
        """own_code: Python of the user's own runs, which may draw from Python's and NumPy's generators."""
        self._hooks = hooks
        self._device = torch.get_device_module(device) if device.type != "cpu" else None
        self._own_code = own_code
        self._buffers = [
            _BufferBefore(path, module, name)
            for path, module in model.named_modules()
            for name in module._buffers
        ]
        self._drawing = [site for site in hooks.sites if site.draws]
        self._generators = self._read()
        self._draws = list[tuple[tuple[str, str], Any]]()

    def take(self) -> None:
        """A step begins. Only buffers that were written since the last one are copied."""
        self._generators = self._read()
        changed = [buffer for buffer in self._buffers if buffer.copy_changed()]
        if changed:
            with torch.no_grad():
                torch._foreach_copy_(
                    [buffer.copy for buffer in changed],  # type: ignore[misc]
                    [buffer.tensor for buffer in changed],  # type: ignore[misc]
                )
        self._draws = [((site.hook_name, site.path), site.draws_place) for site in self._drawing]

    def _read(self) -> tuple[Any, ...]:
        """The states of all generators that the step may draw from."""
        states = (
            torch.default_generator.get_state(),
            self._device.get_rng_state() if self._device is not None else None,
        )
        return (*states, random.getstate(), np.random.get_state()) if self._own_code else states

    def _write(self, states: tuple[Any, ...]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            self._device.set_rng_state(states[1])
        if self._own_code:
            random.setstate(states[2])
            np.random.set_state(states[3])

    @contextmanager
    def generators(self) -> Iterator[None]:
        """Inside it every generator is as the step found it; afterwards as it was."""
        now = self._read()
        self._write(self._generators)
        try:
            yield
        finally:
            self._write(now)

    @torch.no_grad()
    def fill(self, copy: nn.Module, hooks: Installation) -> None:
        """Put the buffers and the hooks' draws of that moment into a copy of the model and its own installation."""
        modules = dict(copy.named_modules())
        for buffer in self._buffers:
            if buffer.copy is not None:
                modules[buffer.path]._buffers[buffer.name] = buffer.copy.clone()
        draws = dict(self._draws)
        for site in hooks.sites:
            if (place := draws.get((site.hook_name, site.path))) is not None:
                site.draws_place = place

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Put back what the step has made NaN or infinite, with the other floating-point buffers of its module.

        So the running statistics of a batch norm never hold a batch that no step was taken from because of them.
        """
        there = [
            (buffer, now, buffer.copy)
            for buffer in self._buffers
            if (now := buffer.module._buffers.get(buffer.name)) is not None and buffer.copy is not None
        ]
        wrong = {buffer.path for buffer, now, kept in there if not_finite(now) and not not_finite(kept)}
        for buffer, now, kept in there:
            if buffer.path in wrong and now.is_floating_point():
                if now is buffer.tensor:
                    now.copy_(kept)
                else:
                    buffer.module._buffers[buffer.name] = kept.clone()
