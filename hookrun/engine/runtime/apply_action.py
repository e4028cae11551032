"""Composes target, index and action of one site into a single function of the value. The hot path."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from hookrun.engine.actions.base import Action, Packed
from hookrun.engine.runtime.by_sample import edit_of_samples, observer_of_samples
from hookrun.engine.runtime.checkpointing import PASSED_ON, require_no_checkpoint
from hookrun.engine.runtime.fast.copies import OF_GRADIENT, KeptInMemory
from hookrun.engine.runtime.part import BatchFirst, TensorPart
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.snapshot import copied
from hookrun.engine.values import containers
from hookrun.engine.values.containers import readable
from hookrun.engine.values.index import Key
from hookrun.engine.values.tensors import computable, elements, has_no_shape, is_float8, widened
from hookrun.errors import HookError, HookrunWarning

_MODE_OF_BATCHES = torch._C._dispatch_key_parse("VmapMode")

NOT_NESTED = (
    "torch cannot compute this on a nested tensor: hook a module that returns a padded one, or switch nested tensors "
    "off, as nn.TransformerEncoder(…, enable_nested_tensor=False) does"
)
_NOT_SPARSE = (
    "torch cannot compute this on a sparse tensor (scale and clip_norm it can): make it a dense one, as "
    "nn.Embedding(…, sparse=False) does its gradient"
)

_COMPUTED = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
"""The dtypes in which torch computes; what is float8 is edited in float32 and rounded to its dtype again."""

Op = Callable[[Any], Any]
"""value -> value; returns the same object if nothing changed."""


def compose(site: HookSite) -> tuple[Op, Op | None]:
    """Everything that happens to a value at a site, except for the schedule.

    The second op, if there is one, is a faster version for tensors that nobody else refers to yet: outputs in new
    memory, gradients of tensor hooks.

    The op of an action on the call itself returns True: whatever is given, the action takes place.

    An op raises only HookrunError: any other exception of an action becomes a HookError that names the hook.
    """
    action, path = site.spec.action, site.target_keys
    if action.of_call:
        return partial(_decide, site), None
    function = function_of(site)
    if not action.observes:
        return _editor(site, function, path), None
    if not isinstance(function, KeptInMemory) or path is not None or site.hook_type.in_tuple:
        return _observer(site, function, path), None
    keep_any = _observer(site, function.keep, None)
    if site.hook_type.phase == "backward":
        keep_gradient = _observer(site, partial(function.keep, references=OF_GRADIENT), None)
        return keep_any, function.observer(site, keep_gradient, references=OF_GRADIENT)
    return function.observer(site, keep_any), function.observer(site, keep_any, new=True)


def _decide(site: HookSite, decided: bool) -> bool:
    site.fired += 1
    return True


def function_of(site: HookSite) -> Op:
    """The action's function, applied to the part that `index`, `tokens` and `heads` select."""
    action, by_sample = site.spec.action, bool(site.spec.keys.when.of_samples)
    part = site.part
    if "flipped" in action.uses:  # faults are listed by their place in the whole tensor, with the batch first
        needs_batch = by_sample or action.works_by_sample
        is_first = site.batch.is_first or not site.hook_type.batch
        part = None if is_first else BatchFirst(None, site.batch, site.current, required=needs_batch)
    function = action.build(site)
    if action.observes:
        function = observer_of_samples(site, function) if by_sample else function
    elif action.scope == "tensor":
        if site.hook_type.on == "reading":
            function = _straight_through(function)
        if action.own_functions() or "args" in action.uses or part is not None or by_sample:
            function = _in_same_form(function)
        if by_sample:
            function = edit_of_samples(site, function)
    if part is not None:
        function = _on_part(site, function, part)
    return _passing_on(site, function) if site.passes_on else function


def _passing_on(site: HookSite, capture: Op) -> Op:
    """The capture, which passes on what it sees to other hooks; in a pass for other ranks it stores nothing."""

    def capture_and_pass(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise ValueError(
                f"another hook takes the value, a {type(value).__name__}: name one tensor by `target`"
            )
        require_no_checkpoint()
        seen = value if site.passed_part is None else site.passed_part.of(value)
        # a copy, since it may be written in place later
        site.clock.calls.forward.passed_on[site.hook_name, site.path] = seen.clone()
        return None if site.clock.stands_in else capture(value)

    return capture_and_pass


class StraightThrough(torch.autograd.Function):
    """A view of the second tensor, whose gradient is that of the first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(old: Tensor, new: Tensor) -> Tensor:
        return new.view_as(new)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _straight_through(function: Op) -> Op:
    """The function of a parameter; a result without a gradient passes its own on to the parameter, unchanged."""

    def edit(old: Tensor) -> Any:
        new = function(old)
        has_none = isinstance(new, Tensor) and not new.requires_grad
        if has_none and old.requires_grad and torch.is_grad_enabled():
            return StraightThrough.apply(old, new)
        return new

    return edit


def _in_same_form(function: Op) -> Op:
    """The function of a tensor, with each of its results checked."""

    def edit(old: Tensor) -> Any:
        new = function(old)
        _require_same_form(old, new)
        return new

    return edit


def _require_same_form(old: Tensor, new: Any) -> None:
    if isinstance(new, Tensor) and (changed := containers.reshaped(old, new)) is not None:
        raise ValueError(changed)


def _editor(site: HookSite, function: Op, path: tuple[Key, ...] | None) -> Op:
    together = site.spec.action.scope == "together"
    clock, takes, of_gradient = site.clock, _taken_by(site.spec.action), site.hook_type.phase == "backward"
    is_own = bool(site.spec.action.own_functions())
    # with the path of the tensor, as observers; each tensor may have another batch dimension
    records = is_own or (site.spec.works_by_sample and not site.batch.is_uniform)
    simple, checked = path is None and not records, False  # `checked`: shape and dtype of the first result
    as_stored = is_own or site.hook_type.until_backward or "flipped" in site.spec.action.uses
    wide: Op = (lambda leaf: leaf) if as_stored else widened

    def edit(value: Any) -> Any:
        site.fired += 1
        try:
            # the common case
            if simple and checked and isinstance(value, Tensor) and value.dtype in _COMPUTED:
                new = function(value)
                if clock.counting and new is not None:
                    count(site, value, new)
                return value if new is None else new
            member = value if path is None else _member(site, value, path)
            olds = [wide(each) for each in containers.tensors(member) if acts_on(each)] if together else []
            news = iter(function(olds) if olds else ())
            paths = {id(leaf): at for at, leaf in containers.leaves(member)} if records else {}
            acted = False

            def edit_leaf(leaf: Any) -> Any:
                nonlocal acted, checked
                if not takes(leaf):
                    return leaf
                acted = True
                if records:
                    site.current.at = paths.get(id(leaf), "")
                new = next(news) if together else function(wide(leaf))
                if new is None:
                    return leaf
                if not as_stored and is_float8(leaf):
                    new = new.to(leaf.dtype)
                if not checked:
                    if of_gradient and has_no_shape(leaf):
                        raise RuntimeError("torch takes no other gradient for it")
                    _require_same_form(leaf, new)
                    checked = not together
                if clock.counting:
                    count(site, leaf, new)
                return new

            changed = containers.rebuild(member, edit_leaf)
            site.idle += not acted
            if changed is member or path is None:
                return value if changed is member else changed
            return containers.put(value, path, changed)
        except PASSED_ON:
            raise
        except Exception as error:
            raise _named(site, error, value) from error

    return edit


def _observer(site: HookSite, function: Op, path: tuple[Key, ...] | None) -> Op:
    takes, current = _taken_by(site.spec.action), site.current
    whole, of_gradient = site.spec.action.scope == "value", site.hook_type.phase == "backward"
    unwrap = path is None and site.hook_type.in_tuple
    plain = path is None and not whole and not unwrap

    def observe_leaves(value: Any) -> Any:
        acted = False
        for current.at, leaf in containers.leaves(value):
            if takes(leaf):
                acted = True
                if (result := function(leaf)) is not None:
                    return result
        site.idle += not acted
        return None

    def observe(value: Any) -> Any:
        site.fired += 1
        try:
            if of_gradient and are_batched():
                site.idle += 1
                warnings.warn(
                    f"{site.where}: gradients are batched (is_grads_batched, vectorize=True): it observes none of them",
                    HookrunWarning,
                    stacklevel=2,
                )
                return value
            if plain and isinstance(value, Tensor) and value.is_floating_point():  # the common case
                current.at = ""
                result = function(value)
            else:
                seen = value if path is None else _member(site, value, path)
                if seen is None and site.spec.action.captures:
                    site.found_nothing()
                    if site.spec.keys.tokens is not None:  # there are no rows to keep
                        return value
                if unwrap:
                    seen = containers.unwrapped(seen)
                result = function(seen) if whole else observe_leaves(seen)
            if result is not None:  # it would be lost silently
                raise ValueError("the action declares `observes = True` and returns a value")
            return value
        except PASSED_ON:
            raise
        except Exception as error:
            # a traced value has nothing to observe, and tracing forbids some operations
            if site.has_values and any(
                not tensor.is_meta and readable(tensor) is None for tensor in containers.tensors(value)
            ):
                return value
            raise _named(site, error, value) from error

    return observe


def _member(site: HookSite, value: Any, path: tuple[Key, ...]) -> Any:
    """The target in the value; the site notes that it is None."""
    member = containers.get(value, path)
    if member is None:
        site.target_was_none = True
    return member


def _named(site: HookSite, error: Exception, value: Any) -> HookError:
    if isinstance(error, RuntimeError):
        if any(tensor.is_nested for tensor in containers.tensors(value)):
            return HookError(f"{site.where}: {NOT_NESTED}")
        # beside a sparse tensor, which torch names, another one may be what is wrong
        if "sparse" in str(error).lower() and any(tensor.is_sparse for tensor in containers.tensors(value)):
            return HookError(f"{site.where}: {_NOT_SPARSE}")
    target = f"target {site.spec.keys.target}: " if isinstance(error, containers.TargetError) else ""
    index = (
        f"index {site.spec.keys.index}: " if isinstance(error, IndexError) and site.spec.keys.index else ""
    )
    return HookError(f"{site.where}: {target}{index}{error}")


def are_batched() -> bool:
    """Whether the gradients of this backward pass stand for several each, which torch cannot copy, detach or read."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_MODE_OF_BATCHES)


def acts_on(leaf: Any) -> bool:
    """Whether it is a floating-point or complex tensor, the kind that actions apply to."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _taken_by(action: Action) -> Callable[[Any], bool]:
    """A predicate: whether the action acts on a member of a value."""
    return (lambda leaf: isinstance(leaf, Tensor)) if action.any_dtype else acts_on


def count(site: HookSite, old: Tensor, new: Tensor | Packed) -> None:
    """Add to the site's counts of changed elements, without waiting for the device."""
    if isinstance(new, Tensor) and not are_batched():  # a `Packed` saved tensor is not comparable
        old, after = old.detach(), new.detach()
        if site.part is not None:
            if site.part.nothing_of(old):
                return
            old, after = site.part.of(old), site.part.of(after)
        old, after = elements(old), elements(after)
        changed = (after != old) & ~(after.isnan() & old.isnan())
        if (total := readable(changed)) is None:  # the model is being traced
            return
        with torch._C._DisableFuncTorch():
            site.changed = site.changed + total.sum()
        site.total += total.numel()


# ---- index, tokens, heads --------------------------------------------------------------------------------------


def _on_part(site: HookSite, function: Op, part: TensorPart) -> Op:
    scope, observes = site.spec.action.scope, site.spec.action.observes
    # of an observer detached: autograd would save an index, and activation checkpointing counts what is saved
    of = (lambda tensor: part.of(tensor.detach())) if observes else part.of
    if scope == "value":
        if site.spec.keys.tokens is not None:
            return _observer_of_tokens(site, function, of)
        return lambda value: function(copied(value, _with_path(site, value, of)))
    if scope == "together":
        return lambda olds: [
            part.put(old, new) for old, new in zip(olds, function(list(map(part.of, olds))), strict=True)
        ]

    def act_on_part(tensor: Tensor) -> Any:
        if part.nothing_of(tensor):
            return site.untouched(tensor)
        new = function(of(tensor))
        if new is None or observes:
            return new
        if isinstance(new, Packed):
            raise ValueError(
                "`index` cannot be used with an action that packs the whole tensor: leave it out"
            )
        return part.put(tensor, new)

    if observes or not site.spec.needs_whole:
        return act_on_part
    current = site.current

    def edit_within(tensor: Tensor) -> Any:
        before, current.whole = current.whole, tensor
        try:
            return act_on_part(tensor)
        finally:
            current.whole = before

    return edit_within


def _with_path(site: HookSite, value: Any, of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of a tensor of the value; the current firing has the tensor's path meanwhile."""
    if isinstance(value, Tensor) or site.batch.is_uniform:
        return of
    paths, current = {id(leaf): path for path, leaf in containers.leaves(value)}, site.current

    def of_tensor(tensor: Tensor) -> Tensor:
        before, current.at = current.at, paths.get(id(tensor), "")
        try:
            return of(tensor)
        finally:
            current.at = before

    return of_tensor


def _observer_of_tokens(site: HookSite, function: Op, of: Callable[[Tensor], Tensor]) -> Op:
    """An observer of whole values under `tokens`; all tensors of a value must have rows for the same positions."""

    def observe(value: Any) -> Any:
        chosen = dict[int, Any]()

        def rows(tensor: Tensor) -> Tensor:
            taken, of_tensor = of(tensor), site.current.chosen
            chosen[id(of_tensor)] = of_tensor
            return taken

        taken = copied(value, _with_path(site, value, rows))
        if len(chosen) != 1 and value is not None:
            what = "tensors of several sequences" if chosen else "no tensor"
            raise ValueError(f"tokens: the value holds {what}: name one with `target`")
        if any(map(len, chosen.values())):
            return function(taken)
        site.found_nothing()
        return None

    return observe


# ---- gradients without the factor of mixed precision's gradient scaler ---------------------------------------------


def unscaled(op: Op, scaler: GradScaler) -> Op:
    """The op, applied to gradients without the gradient scaler's factor; its result gets the factor again."""

    def run(value: Any) -> Any:
        scale = scaler._scale  # get_scale() would synchronize with the device for each gradient
        return op(value) if scale is None else run_unscaled(op, value, scale)

    return run


def run_unscaled(op: Op, value: Any, scale: Tensor) -> Any:
    """Divide the value by the scale, apply the op and multiply the result by the scale again.

    The op gets 16-bit gradients as 32-bit ones: in 16 bits small unscaled gradients would underflow.
    """
    plain = containers.rebuild(
        value, lambda leaf: _unscaled_tensor(leaf, scale) if isinstance(leaf, Tensor) else leaf
    )
    new = op(plain)
    if new is plain:
        return value
    pairs = zip(containers.members(value), containers.members(plain), strict=True)

    def rescaled(leaf: Any) -> Any:
        old, seen = next(pairs)
        return old if leaf is seen else (leaf * scale).to(old.dtype)

    return containers.rebuild(new, rescaled)


def _unscaled_tensor(tensor: Tensor, scale: Tensor) -> Tensor:
    return computable(tensor) / scale
