"""`forward_pre` and `forward`: a module's arguments and its output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookrun.hook_types import FORWARD, FORWARD_PRE
from hookrun.runtime.checkpointing import NO_BACKWARD, graph_task
from hookrun.runtime.compiled import tracing
from hookrun.runtime.fast.direct_calls import Direct, maker
from hookrun.runtime.hooks.base import BoundHook, ModuleHook, in_backward, in_graph
from hookrun.values.containers import arguments, call_with


class ForwardPre(ModuleHook):
    """`forward_pre`: the arguments."""

    hook_types = (FORWARD_PRE,)
    depth = 0

    def before(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that gets keyword arguments too."""
        yield module.register_forward_pre_hook(self.forward_pre, with_kwargs=True)

    def forward_pre(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's forward pre-hook, registered with kwargs."""
        value = before = arguments(args, kwargs)
        if tracing():
            return call_with(in_graph(self.firings, value))
        if self.reads_arguments:
            for firing in self.firings:
                value = _with_arguments(firing, value, value)
        elif graph_task() != NO_BACKWARD:
            value = in_backward(self.firings, value)
        else:
            for op in self.ops:
                value = op(value)
        return None if value is before else call_with(value)


class Forward(ModuleHook):
    """`forward`: the output."""

    hook_types = (FORWARD,)
    depth = 2

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook; with keyword arguments, which cost a little, only for actions that read arguments."""
        if self.reads_arguments:
            yield module.register_forward_hook(self.forward_with_arguments, with_kwargs=True)
        else:
            yield module.register_forward_hook(self.forward)

    def forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook."""
        if tracing():
            return in_graph(self.firings, output)
        if graph_task() != NO_BACKWARD:
            return in_backward(self.firings, output)
        for op in self.ops:
            output = op(output)
        return output

    def forward_with_arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """torch's forward hook, registered with kwargs."""
        inputs = arguments(args, kwargs)
        for firing in self.firings:
            output = _with_arguments(firing, inputs, output)
        return output

    def direct(self, module: nn.Module) -> Direct | None:
        """The same actions in a direct call, which passes on the output only.

        A single action has no loop, and its faster op where the module's output is always in new memory.
        """
        if self.reads_arguments:
            return None
        if len(self.ops) > 1:
            return Direct(self._run)
        made_by, of_new = maker(module), self.firings[0].op_of_new
        return Direct(self.ops[0]) if made_by is None or of_new is None else Direct(of_new, made_by)

    def _run(self, output: Any) -> Any:
        for op in self.ops:
            output = op(output)
        return output


def _with_arguments(firing: BoundHook, inputs: Any, value: Any) -> Any:
    """Run a firing whose action can read the arguments of the module call meanwhile."""
    current = firing.site.current
    current.args = inputs
    if tracing():
        value = firing.traced.fire(value)
    elif graph_task() != NO_BACKWARD:
        value = in_backward((firing,), value)
    else:
        value = firing.op(value)
    current.args = None
    return value
