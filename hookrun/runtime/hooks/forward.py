"""`forward_pre` and `forward`: a module's arguments and its output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookrun.hook_types import FORWARD, FORWARD_PRE
from hookrun.runtime.apply_action import Op
from hookrun.runtime.checkpointing import NO_BACKWARD, graph_task
from hookrun.runtime.compiled import tracing
from hookrun.runtime.fast.direct_calls import Direct, maker
from hookrun.runtime.hooks.base import BoundHook, ModuleHook, Shared, in_backward, in_graph
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
        if graph_task() != NO_BACKWARD:
            value = in_backward(self.firings, value)
        else:
            for op in self.ops:
                value = op(value)
        return None if value is before else call_with(value)


class Forward(ModuleHook):
    """`forward`: the output."""

    hook_types = (FORWARD,)
    depth = 2

    @classmethod
    def of(cls, firings: Sequence[BoundHook], shared: Shared) -> Forward:
        """An object of the fastest class that these firings allow."""
        if any("args" in firing.site.spec.action.uses for firing in firings):
            return ForwardWithArguments(firings, shared)
        return ForwardOne(firings, shared) if len(firings) == 1 else Forward(firings, shared)

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook without keyword arguments, which would cost a little."""
        yield module.register_forward_hook(self.forward)

    def forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook."""
        if tracing():
            return in_graph(self.firings, output)
        if graph_task() != NO_BACKWARD:
            return in_backward(self.firings, output)
        return self.run(output)

    def run(self, output: Any) -> Any:
        """Run the actions one after the other."""
        for op in self.ops:
            output = op(output)
        return output

    def direct(self, module: nn.Module) -> Direct | None:
        """The same actions in a direct call."""
        return Direct(self.run)


class ForwardOne(Forward):
    """`forward` with a single action, the most frequent case: no loop."""

    def __init__(self, firings: Sequence[BoundHook] = (), shared: Shared | None = None) -> None:
        super().__init__(firings)
        self.op: Op = self.ops[0] if self.ops else _unchanged

    def forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """torch's forward hook."""
        if tracing():
            return in_graph(self.firings, output)
        return self.op(output) if graph_task() == NO_BACKWARD else in_backward(self.firings, output)

    def direct(self, module: nn.Module) -> Direct | None:
        """The same action in a direct call, with the faster op if the module's output is always in new memory."""
        made_by, of_new = maker(module), self.firings[0].op_of_new
        return Direct(self.op) if made_by is None or of_new is None else Direct(of_new, made_by)

    def clear(self) -> None:
        """Drop all firings: the object does nothing from now on."""
        super().clear()
        self.op = _unchanged


def _unchanged(value: Any) -> Any:
    return value


class ForwardWithArguments(Forward):
    """`forward` with an action that reads the module's arguments too: positional ones, then keyword ones."""

    def direct(self, module: nn.Module) -> Direct | None:
        """None: a direct call passes on the output only."""
        return None

    def after(self, module: nn.Module) -> Iterable[RemovableHandle]:
        """Register a hook that gets keyword arguments too."""
        yield module.register_forward_hook(self.forward_with_arguments, with_kwargs=True)

    def forward_with_arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """torch's forward hook, registered with kwargs."""
        for firing in self.firings:
            firing.site.current.args = (*args, *kwargs.values()) if kwargs else args
            if tracing():
                output = firing.traced.fire(output)
            elif graph_task() != NO_BACKWARD:
                output = in_backward((firing,), output)
            else:
                output = firing.op(output)
            firing.site.current.args = ()
        return output
