"""The action `python`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, PlainSerializer
from pydantic.json_schema import SkipJsonSchema

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.user_code import (
    CONTEXT,
    called,
    callee,
    kept_tensors,
    made,
    on_tensor,
    parameters_of,
)
from hookrun.engine.actions.values import InlineFunction, as_data, as_python_value, copy_of
from hookrun.engine.hook_types import APPLY, FORWARD, FORWARD_PRE, ON_VALUES
from hookrun.engine.trust.callables import Code
from hookrun.engine.validation import takes
from hookrun.errors import HookrunError

if TYPE_CHECKING:
    from torch.nn import Module

_NAME = re.compile(r"[^\W\d][\w.-]*(:\w+)?")


def _function(raw: Any) -> Any:
    """The function's name, which is imported only when the plan is made, or, in Python, the function itself."""
    function = raw if isinstance(raw, str) and _NAME.fullmatch(raw) else as_python_value(raw)
    if not isinstance(function, str | InlineFunction):
        raise ValueError(
            f"found {raw!r:.200}, expected a function of a package, such as mypkg.hooks:soften, or the short name "
            "that an installed package gives it"
        )
    return function


class Python(Action):
    """Call your own function(value, **args), which returns a new value of the same form, or None.

    function: `package.module:function` of a package that is trusted (`HOOKRUN_TRUST=package`, `+trust=[package]`), or
              the name of an installed entry point in the group `hookrun.actions`; in Python the function itself
    args:     further keyword arguments of the function

    The function is called with each floating-point tensor, as for any action; on `apply` with the module. If it has a
    parameter `context`, it gets a `HookContext`: hook, path, module, mode, epoch, step, call, target and inputs, the
    arguments of the module's call (on `forward` and `forward_pre`). `context.record("sparsity", number)` records a
    statistic of your own as `stats` does; the numbers of one call are one line. Draw random numbers with
    `generator=context.generator(x)`; drawing from torch's global generator or changing the tensor in place is an error.

    For a class, one object is created for each module, with `args`, and called with the values. If it is a
    `torch.nn.Module`, each hooked module gets its parameters, under the names `<hook>_<name>`: on `forward` and
    `forward_pre` they are trained, saved and loaded with the model, and `hooks.parameters()` has them. They start from
    a seed of hook and module, in the model's dtype; the object is in the hooked module's mode. Persistent buffers are
    saved and resumed in the same way; a call may replace one by another tensor of its shape. In Python an object may be
    given instead: all selected modules share it. Other state that your code keeps between calls is lost when a run is
    resumed, unless the object has the methods `state_dict()` (plain values and tensors) and `load_state_dict(state)`.
    """

    action_name = "python"
    hook_types = ON_VALUES | {APPLY}
    uses = ("generator",)
    function: Annotated[
        str | SkipJsonSchema[InlineFunction], BeforeValidator(_function), Meaning.OWN_FUNCTION
    ]
    args: Annotated[
        dict[str, Any], BeforeValidator(copy_of), PlainSerializer(as_data), Meaning.ARGUMENTS
    ] = {}

    def build(self, site: HookSite) -> Edit:
        """A function that calls it with its arguments and checks the result."""
        function, name = site.function("function"), site.hook_name
        target, args = function.target, copy_of(self.args)
        if isinstance(target, type):
            target, args = called(name, function.code, target, lambda it: made(it, args, site.seed)), {}
        kept = kept_tensors(target) if site.hook_type in (FORWARD, FORWARD_PRE) else parameters_of(target)
        if not kept and all(
            callable(getattr(target, method, None)) for method in ("state_dict", "load_state_dict")
        ):
            site.register_state(target)
        call = site.adopted(target, given=target is function.target)
        call = _with_context(call, args, site) if takes(callee(target), CONTEXT) else partial(call, **args)
        if site.hook_type is APPLY:
            return _on_module(site, function.code, call)
        return on_tensor(name, function.code, call)


def _with_context(target: Callable[..., Any], args: dict[str, Any], site: HookSite) -> Edit:
    site.reads_arguments = True  # it may ask for the inputs

    def with_context(value: Any) -> Any:
        with site.context() as context:
            return target(value, **args, context=context)

    return with_context


def _on_module(site: HookSite, code: Code, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def on_module(module: Module) -> None:
        new = called(site.hook_name, code, module, call)
        if new is not None and new is not module:
            raise HookrunError(
                f"hook {site.hook_name!r} on {site.path or '(root)'}: '{code.name}' returned an object of type "
                f"{type(new).__name__}: on {APPLY.name!r} it changes the module that it is given, and returns None"
            )

    return on_module
