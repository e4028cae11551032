"""Calls of a user's own code, and whether a call failed only because the tensors of a fake run hold no data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookrun.engine.actions.base import ABOUT
from hookrun.engine.actions.values import copy_of
from hookrun.engine.trust.callables import Code, place_of
from hookrun.engine.validation import join, takes, wrong_call
from hookrun.engine.values.tensors import holds_data, ordinary_tensors, require_whole
from hookrun.errors import HookrunError, Problem, reason

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from hookrun.engine.actions.values import InlineFunction
    from hookrun.engine.trust.load import Trusted

CONTEXT = "context"
"""The name of the parameter by which a function asks for the `HookContext`."""


_KEY = re.compile(r"[^\W\d][\w.-]{0,99}")
_TAKEN = ABOUT | {"ok", "spent", "bytes"}
"""The keys of a record that mean the same for every action."""


@dataclass
class Recorded:
    """The statistics that a user's own function records in one call.

    numbers: None after the call
    """

    numbers: dict[str, Any] | None = field(default_factory=dict)

    def add(self, name: str, number: Any) -> None:
        """Take a number, see `HookContext.record`. Raises ValueError."""
        import torch

        if self.numbers is None:
            raise ValueError("context.record: the call is over: record in it")
        if not isinstance(name, str) or _KEY.fullmatch(name) is None:
            raise ValueError(
                f"context.record: found the name {name!r:.100}, expected at most 100 letters, digits, _, - and ., "
                "beginning with a letter or _"
            )
        if name in _TAKEN or name in self.numbers:
            raise ValueError(
                f"context.record: the record of this call has {name!r} already: choose another name"
            )
        if isinstance(number, torch.Tensor):
            require_whole(number)
            is_real = not (number.dim() or number.is_complex() or number.dtype is torch.bool)
            number = number.detach().clone()  # it is read later
        else:
            is_real = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_real:
            raise ValueError(
                f"context.record: {name!r} is {number!r:.100}, expected a real number or a real tensor []"
            )
        self.numbers[name] = number


class UserCodeError(ValueError):
    """A user's own code raised an exception, which is the `__cause__`.

    call: what was called with `value`
    """

    def __init__(
        self, hook: str, code: Code, error: Exception, value: Any, call: Callable[[Any], Any]
    ) -> None:
        self.hook = hook
        self.error = error
        self.value = value
        self.call = call
        super().__init__(f"'{code.name}' failed: {reason(error)}{place_of(error, code.package)}")


def called(hook: str, code: Code, value: Any, call: Callable[[Any], Any]) -> Any:
    """The result of the user's own code.

    Raises UserCodeError from its exceptions, except HookrunError and the one with which torch's activation
    checkpointing ends a recomputation.
    """
    try:
        return call(value)
    except HookrunError:
        raise
    except Exception as error:
        if type(error).__module__ == "torch.utils.checkpoint":  # ends a recomputation early
            raise
        raise UserCodeError(hook, code, error, value, call) from error


def checked(
    function: Trusted | InlineFunction, arguments: Mapping[str, Any], where: str
) -> tuple[Any, list[Problem]]:
    """The user's own function, of a class an object; and why it cannot be called with a value and the arguments.

    where: the key path of the hook
    """
    target, owner, args = function.target, function.code.name, join(where, "args")
    if isinstance(target, type):
        if problems := wrong_call(target, arguments, args, owner):
            return None, problems
        try:
            target = made(target, copy_of(arguments), 0)
        except Exception as error:  # the user's own code may raise anything
            return None, [
                Problem(args, f"'{owner}' cannot be made: {reason(error)}", "correct the arguments")
            ]
        if not callable(target):
            return None, [
                Problem(
                    join(where, "function"),
                    f"'{owner}' is a class whose objects cannot be called",
                    "give it a method __call__(self, value)",
                )
            ]
        arguments = {}
    return target, wrong_call(callee(target), arguments, args, owner, first=1, also=[CONTEXT])


def untrainable(own: Any, *, reached: bool) -> tuple[str, str] | None:
    """Why the tensors of the user's own module cannot become tensors of the model, and the next step; or None.

    reached: gradients reach them on the hook type
    """
    from torch.nn.parameter import is_lazy

    kept = dict(kept_tensors(own))
    if not reached:
        for name, _ in parameters_of(own):
            what = f"has the parameter {name!r}, which is trained on forward and forward_pre only"
            return what, "use one of them; what is not trained may be a buffer"
    for name, tensor in kept.items():
        if is_lazy(tensor):
            return f"has {name!r} without a shape", "give the sizes: args: {in_features: 64}"
    for name in sorted(own.state_dict().keys() - kept.keys()):
        what = f"keeps {name!r} beside its parameters and buffers, which a checkpoint would not have"
        return what, "make it a parameter or a buffer"
    added = added_names(own, "").values()
    if len(set(added)) < len(added):
        what = "has parameters or buffers whose names differ in . and _ only"
        return what, "rename one: a parameter's name has no dot"
    return None


def parameters_of(target: Any) -> list[tuple[str, Parameter]]:
    """The parameters of a user's own module by all of their names; of other objects none."""
    from torch.nn import Module

    if not isinstance(target, Module):
        return []
    return list(Module.named_parameters(target, remove_duplicate=False))  # it may redefine `named_parameters`


def kept_tensors(target: Any) -> list[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a user's own module by all of their names; of other objects none."""
    from torch.nn import Module

    if not isinstance(target, Module):
        return []
    kept: list[tuple[str, Tensor]] = [*parameters_of(target)]
    for path, part in Module.named_modules(target, remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                kept.append((join(path, name), buffer))
    return kept


def added_names(target: Any, hook_name: str) -> dict[Tensor, str]:
    """The `kept_tensors`, each with the name under which a hooked module has it: without dots."""
    names: dict[Tensor, str] = {}
    for name, tensor in kept_tensors(target):
        names.setdefault(tensor, f"{hook_name}_{name.replace('.', '_')}")
    return names


def callee(target: Callable[..., Any]) -> Callable[..., Any]:
    """What has the parameters of a call: of a module its forward."""
    from torch.nn import Module

    return target.forward if isinstance(target, Module) else target


def made(cls: type, arguments: Mapping[str, Any], seed: int) -> Any:
    """An object of the class; random numbers in its constructor depend on the seed only."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with torch.random.fork_rng(devices=[]), ordinary_tensors(), unset_fake_temporarily():
        torch.default_generator.manual_seed(seed)
        return cls(**arguments)


def may_draw(functions: Iterable[Trusted | InlineFunction]) -> bool:
    """Whether one of them takes `context`, which has the generator; True for a class.

    Whether the objects of a class take it is known only when they are created.
    """
    targets = [function.target for function in functions]
    return any(isinstance(target, type) or takes(callee(target), CONTEXT) for target in targets)


def on_tensor(
    hook: str, code: Code, call: Callable[[Tensor], Any], *, computes: bool = False
) -> Callable[[Tensor], Any]:
    """Wrap `call`: ValueError if it changes its tensor in place or draws from torch's global generator.

    It returns a tensor or None; if it `computes` a value, a tensor or a number. ValueError for other objects.
    """
    import torch

    other = "a number" if computes else "None"
    kinds = torch.Tensor | int | float if computes else torch.Tensor | None

    def states(x: Tensor) -> list[Tensor]:
        """Those of the global generators that may be drawn from; eight bytes at a time compare faster."""
        state = torch.default_generator.get_state().view(torch.int64)
        if x.device.type == "cpu" or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return [state]
        of_device = getattr(getattr(torch, x.device.type, None), "get_rng_state", None)
        if of_device is None:
            return [state]
        return [state, of_device() if x.is_mps else of_device(x.device)]

    def on_tensor(x: Tensor) -> Any:
        is_real = holds_data(x)
        seen = _versioned(x) if is_real and x.is_inference() else x
        version = 0 if seen.is_inference() else seen._version
        before = states(x) if is_real else []
        new = called(hook, code, seen, call)
        if is_real and not all(map(torch.equal, before, states(x))):
            raise ValueError(
                f"'{code.name}' draws from torch's global generator, which changes the rest of the run: take a "
                "parameter `context`, and draw with generator=context.generator(value)"
            )
        if not seen.is_inference() and seen._version != version:
            raise ValueError(f"'{code.name}' changes its value in place: return a new tensor")
        if not isinstance(new, kinds):
            raise ValueError(
                f"'{code.name}' returned an object of type {type(new).__name__}, expected a tensor or {other}"
            )
        return x if new is seen else new

    return on_tensor


def _versioned(x: Tensor) -> Tensor:
    """An alias of an inference tensor that has a version, which tells whether it was written in place."""
    import torch

    if type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_nested:
        return x
    x = x.resolve_conj().resolve_neg()
    with torch.inference_mode(mode=False):
        alias = torch.empty(0, dtype=x.dtype, device=x.device)
        return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def only_without_data(failed: UserCodeError) -> str | None:
    """Why the function cannot run on a tensor without data although it runs on one with data; else None.

    Code that reads elements (`.item()`, NumPy, a condition on a value) raises many kinds of exception in a fake run.
    If the exception does not tell, the function is called with random numbers of the same shape and dtype.
    """
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    why = reason(failed.error)
    if _about_fake_tensors(failed.error):
        return why
    if not isinstance(failed.value, torch.Tensor):
        return None
    fake = failed.value
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
        real = torch.empty(tuple(fake.shape), dtype=fake.dtype, device=fake.device).zero_()
        if real.is_floating_point():
            real.normal_(generator=torch.Generator(real.device).manual_seed(0))
            real.requires_grad_(fake.requires_grad)
        try:
            failed.call(real)
        except Exception as again:  # the user's own code may raise anything
            return why if _about_fake_tensors(again) else None
    return why


def _about_fake_tensors(error: BaseException | None) -> bool:
    """Whether the exception, or what caused it, says that a tensor is not a real one."""
    while error is not None:
        says_so = isinstance(error, RuntimeError | TypeError) and "FakeTensor" in str(error)
        if says_so or type(error).__module__.startswith(("torch._subclasses", "torch.fx")):
            return True
        error = error.__cause__ or error.__context__
    return False
