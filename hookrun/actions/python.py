"""The action `python`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, PlainSerializer
from pydantic.json_schema import SkipJsonSchema

from hookrun.actions.base import Action, Site
from hookrun.actions.given import GivenFunction, given, kept, plain
from hookrun.actions.own_code import called, on_tensor
from hookrun.arguments import join, takes, wrong_call
from hookrun.callables import Code
from hookrun.errors import HookrunError, Problem, reason
from hookrun.hook_types import APPLY, ON_VALUES
from hookrun.trusted import Trusted

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

CONTEXT = "context"
_NAME = re.compile(r"[^\W\d][\w.-]*(:\w+)?")


def _function(raw: Any) -> Any:
    """The function's name, which is imported only when the plan is made, or, in Python, the function itself."""
    if isinstance(raw, str):
        if not _NAME.fullmatch(raw):
            raise ValueError(
                f"found {raw[:200]!r}, expected a function of a package, such as mypkg.hooks:soften, "
                "or the short name that an installed package gives it"
            )
        return raw
    found = given(raw)
    if not isinstance(found, GivenFunction):
        raise ValueError(f"found {raw!r}, expected a function of a package, such as mypkg.hooks:soften")
    return found


class Python(Action):
    """Call your own function(value, **args), which returns a new value of the same form, or None.

    function: `package.module:function` of a package that is trusted (`HOOKRUN_TRUST=package`, `+trust=[package]`), or
              the name of an installed entry point in the group `hookrun.actions`; in Python the function itself
    args:     further keyword arguments of the function

    The function is called with each floating-point tensor, as for any action; on `apply` with the module. If it has a
    parameter `context`, it gets a `HookContext`: hook, path, module, mode, epoch, step, call, target. Draw random
    numbers with `generator=context.generator(x)`; drawing from torch's global generator or changing the tensor in place
    is an error. For a class, one object is created for each module, with `args`, and called with the values; its
    parameters are not trained. State that your code keeps between calls is lost when a run is resumed, unless the
    object has the methods `state_dict()` (plain values and tensors) and `load_state_dict(state)`.
    """

    action_name = "python"
    hook_types = ON_VALUES | {APPLY}
    draws = True
    computes_anew = True
    own_code = True
    function: Annotated[str | SkipJsonSchema[GivenFunction], BeforeValidator(_function)]
    args: Annotated[dict[str, Any], BeforeValidator(kept), PlainSerializer(plain)] = {}

    def own_functions(self) -> dict[str, str | GivenFunction]:
        """`function`."""
        return {"function": self.function}

    def may_draw(self, functions: Collection[Trusted | GivenFunction]) -> bool:
        """Whether the function takes `context`, which has the generator; True for a class.

        Whether the objects of a class take it is known only when they are created.
        """
        targets = [function.target for function in functions]
        return any(isinstance(target, type) or takes(target, CONTEXT) for target in targets)

    def misfit(self, function: Trusted | GivenFunction, where: str) -> list[Problem]:
        """Why it cannot be called with the value and the arguments; of a class one object is created to test it."""
        target, owner, args = function.target, function.code.name, join(where, "args")
        if not isinstance(target, type):
            return _in_call(target, self.args, where, owner)
        if problems := wrong_call(target, self.args, args, owner):
            return problems
        try:
            made = _made(target, self.args, 0)
        except Exception as error:  # the user's own code may raise anything
            return [Problem(args, f"'{owner}' cannot be made: {reason(error)}", "correct the arguments")]
        if not callable(made):
            text = f"'{owner}' is a class whose objects cannot be called"
            return [Problem(join(where, "function"), text, "give it a method __call__(self, value)")]
        return _in_call(made, {}, where, owner)

    def build(self, site: Site) -> Callable[[Any], Any]:
        """A function that calls it with its arguments and checks the result."""
        function, name = site.function("function"), site.hook_name
        target, args = function.target, kept(self.args)
        if isinstance(target, type):
            target, args = called(name, function.code, target, lambda it: _made(it, args, site.seed)), {}
        if all(callable(getattr(target, name, None)) for name in ("state_dict", "load_state_dict")):
            site.holds(target)
        call = _with_context(target, args, site)
        if site.hook_type is APPLY:
            return _on_module(site, function.code, call)
        return _returning_tensors(function.code, on_tensor(name, function.code, call))


def _in_call(target: Callable[..., Any], args: dict[str, Any], where: str, owner: str) -> list[Problem]:
    return wrong_call(target, args, join(where, "args"), owner, first=1, also=[CONTEXT])


def _made(cls: type, args: dict[str, Any], seed: int) -> Any:
    """An object of the class; random numbers in its constructor depend on the seed only."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return cls(**args)


def _with_context(target: Callable[..., Any], args: dict[str, Any], site: Site) -> Callable[[Any], Any]:
    if not takes(target, CONTEXT):
        return lambda value: target(value, **args)
    context = site.context
    return lambda value: target(value, **args, context=context())


def _on_module(site: Site, code: Code, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def on_module(module: Module) -> None:
        new = called(site.hook_name, code, module, call)
        if new is not None and new is not module:
            raise HookrunError(
                f"hook {site.hook_name!r} on {site.path or '(root)'}: '{code.name}' returned an object of type "
                f"{type(new).__name__}: on {APPLY.name!r} it changes the module that it is given, and returns None"
            )

    return on_module


def _returning_tensors(code: Code, call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    from torch import Tensor

    def returning_tensors(x: Tensor) -> Any:
        new = call(x)
        if new is not None and not isinstance(new, Tensor):
            raise ValueError(
                f"'{code.name}' returned an object of type {type(new).__name__}, expected a tensor or None"
            )
        return new

    return returning_tensors
