"""`forward_pre` and `forward`: a module's arguments and its output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookrun.engine.hook_types import FORWARD, FORWARD_PRE
from hookrun.engine.runtime.compiled import tracing
from hookrun.engine.runtime.fast.direct_calls import call_directly, maker
from hookrun.engine.runtime.hooks.base import BoundHook, ModuleHook, fire
from hookrun.engine.values.containers import arguments, call_with


class ForwardPre(ModuleHook):
    """`forward_pre`: the arguments."""

    hook_types = (FORWARD_PRE,)
    depth = 0

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that gets keyword arguments too."""
        yield nn.Module.register_forward_pre_hook(module, self.forward_pre, with_kwargs=True)

    def forward_pre(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's forward pre-hook, registered with kwargs."""
        value = arguments(args, kwargs)
        new = _with_arguments(self.firings, value) if self.reads_arguments else fire(self.firings, value)
        return None if not tracing() and new is value else call_with(new)


class Forward(ModuleHook):
    """`forward`: the output."""

    hook_types = (FORWARD,)
    depth = 2

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook; with keyword arguments, which cost a little, only for actions that read arguments."""
        if self.reads_arguments:
            yield nn.Module.register_forward_hook(module, self.forward_with_arguments, with_kwargs=True)
        else:
            yield nn.Module.register_forward_hook(module, self.forward)

    def forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook."""
        return fire(self.firings, output)

    def forward_with_arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """torch's forward hook, registered with kwargs."""
        return _with_arguments(self.firings, output, arguments(args, kwargs))

    def call_directly(self, module: nn.Module, number: int) -> object | None:
        """Start direct calls with the same actions, which get the output only.

        A single action has no loop, and its faster op where the module's output is always in new memory.
        """
        if self.reads_arguments:
            return None
        if len(self.firings) > 1:
            return call_directly(module, number, partial(self.forward, module, ()))
        only = self.firings[0]
        made_by = maker(module)
        op_of_new = None if made_by is None else only.op_of_new()
        if op_of_new is None:
            return call_directly(module, number, only.op)
        return call_directly(module, number, op_of_new, made_by)


def _with_arguments(firings: Sequence[BoundHook], value: Any, inputs: Any = None) -> Any:
    """Run the firings, whose actions can read the arguments of the module call meanwhile: the inputs, or the value."""
    for firing in firings:
        current = firing.site.current
        current.args = value if inputs is None else inputs
        value = fire((firing,), value)
        current.args = None
    return value
