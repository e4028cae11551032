"""The state before a training step, other than parameters: random generators, buffers, random draws of hooks."""

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
    """One buffer of a module, and its copy.

    tensor:  the buffer at the time of the copy
    version: torch's version counter of `tensor` at the time of the copy; None: writes do not increase the counter
    """

    path: str
    module: nn.Module
    name: str
    tensor: Tensor | None = None
    version: int | None = None
    copy: Tensor | None = None

    def copy_changed(self) -> bool:
        """Whether the buffer may differ from its copy; if shape or dtype changed, it is copied here."""
        now = self.module._buffers.get(self.name)
        if now is None:
            self.tensor = self.copy = None
            return False
        uncounted = isinstance(self.module, _NormBase) or now.is_inference()  # torch counts no versions there
        version = None if uncounted else now._version
        if now is self.tensor and version is not None and version == self.version:
            return False
        self.tensor, self.version = now, version
        if self.copy is None or self.copy.shape != now.shape or self.copy.dtype != now.dtype:
            self.copy = now.detach().clone()
            return False
        return True


class BeforeStep:
    """The state before a step, recorded before each step so that the step can be repeated."""

    def __init__(
        self, model: nn.Module, hooks: Installation, device: torch.device, *, own_code: bool
    ) -> None:
        """own_code: the run uses the user's own Python code, which may use Python's and NumPy's generators."""
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
        """Record the state. Only buffers that were written since the last call are copied."""
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
        """The states of all random generators that the step may use."""
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
        """Within the block every random generator has its state from before the step; afterwards its present state."""
        now = self._read()
        self._write(self._generators)
        try:
            yield
        finally:
            self._write(now)

    @torch.no_grad()
    def fill(self, copy: nn.Module, hooks: Installation) -> None:
        """Write the recorded buffers and states of the hooks' draws into a copy of the model and its installation."""
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
        """Restore buffers that the step has made NaN or infinite, with the other floating-point buffers of the module.

        So a batch for which no step was taken does not stay in the running statistics of a batch norm.
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
