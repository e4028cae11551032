"""compute.compile: the hooked model compiled by torch.compile, compared with the model itself before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hookrun.engine.runtime import Installation
from hookrun.engine.values.containers import tensors
from hookrun.errors import HookrunError


class Compiled:
    """Calls the compiled model. The first batch in each mode runs in both models, whose results have to agree.

    A mode is training or evaluation, with or without gradients. Gradients themselves are not compared.
    """

    def __init__(self, hooks: Installation, model: nn.Module) -> None:
        self._hooks = hooks
        self._model = model
        self._compiled = hooks.compile()
        self._trusted = set[tuple[bool, bool]]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the compiled model. Raises HookrunError if it differs from the output of the model itself."""
        mode = (self._model.training, torch.is_grad_enabled())
        if mode not in self._trusted:
            self._compare(args, kwargs)
            self._trusted.add(mode)
        return self._compiled(*args, **kwargs)

    def _compare(self, args: Any, kwargs: Any) -> None:
        expected, fired, drew = self._tried(self._model, args, kwargs)
        found, compiled_fired, _ = self._tried(self._compiled, args, kwargs)
        hint = "run it with compute.compile=false"
        for (hook, path), count in fired.items():
            if compiled_fired[hook, path] != count:
                raise HookrunError(
                    f"hook {hook!r} on {path or '(root)'} fires {compiled_fired[hook, path]} times in the compiled "
                    f"model, {count} in the model itself: {hint}"
                )
        # a compiled dropout draws other numbers
        if not drew and (difference := relative_difference(found, expected)) > TOLERANCE:
            raise HookrunError(f"the compiled model's output differs by {difference:.2g} of its norm: {hint}")

    def _tried(self, call: Any, args: Any, kwargs: Any) -> tuple[Any, dict[tuple[str, str], int], bool]:
        """Output, firings by (hook, path), and whether random numbers were drawn; the state of the run is restored."""
        hooks = self._hooks
        sites = [(site.hook_name, site.path) for site in hooks.sites if site.hook_type.phase == "forward"]
        with hooks.uncounted(), hooks.unrecorded(), buffers_kept(self._model), torch.random.fork_rng():
            before, state = dict(hooks.fired), torch.get_rng_state()
            output = call(*args, **kwargs)
            after = hooks.fired
            fired = {key: after[key] - before[key] for key in sites}
            return output, fired, not torch.equal(torch.get_rng_state(), state)


TOLERANCE = 0.02
"""The largest accepted relative difference: fused kernels round differently, a missing hook changes far more."""


def relative_difference(found: Any, expected: Any) -> float:
    """The norm of the difference of two tensors, relative to the expected one's norm; the largest of all tensors."""
    shares: list[float] = []
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        if theirs.numel():
            theirs = theirs.detach().double()
            difference = (ours.detach().double() - theirs).norm()
            shares.append(float(difference / theirs.norm().clamp_min(1e-12)))
    return max(shares, default=0.0)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, such as running means, after the block, even if a module has replaced one."""
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, (buffer, copy) in before.items():
                path, _, last = name.rpartition(".")
                module = nn.Module.get_submodule(model, path)
                if getattr(module, last) is not buffer:
                    module._buffers[last] = buffer
                if not torch.equal(buffer, copy):  # batch norm writes without counting a version
                    buffer.copy_(copy)
