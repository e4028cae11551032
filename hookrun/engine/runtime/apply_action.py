"""The way of a value through a site: schedule, scale, target, part, action, checks and counts. The hot path."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.engine.actions.base import Absent, Action, Packed
from hookrun.engine.hook_types import SAVED_TENSORS
from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.runtime.by_sample import edit_of_samples, observer_of_samples
from hookrun.engine.runtime.checkpointing import PASSED_ON, require_no_checkpoint
from hookrun.engine.runtime.clock import gate
from hookrun.engine.runtime.fast.copies import OF_GRADIENT, KeptInMemory
from hookrun.engine.runtime.part import BatchFirst, TensorPart
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.snapshot import copied
from hookrun.engine.values import containers
from hookrun.engine.values.containers import readable
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


class SiteRunner:
    """Runs the hook of one site; `fire` is the way of each value through it.

    site: the hook at its place, with its counts
    for_other_ranks: this rank may make passes for other ranks only. Their gradients are all zero, so observers and
                     edits of gradients are left out of them
    """

    def __init__(self, site: HookSite, *, for_other_ranks: bool = False) -> None:
        spec = site.spec
        if site.draws:
            site.prepare_draws()
        self.site = site
        self._for_other_ranks = for_other_ranks
        self._holds = None if spec.fires_always else self._schedule()
        is_gradient = site.hook_type.phase == "backward"
        self._scaler = site.clock.scaler if is_gradient else None
        self._waits_for_rows = False
        if for_other_ranks and site.hook_type.sees_batch:
            self._waits_for_rows = is_gradient or (spec.action.observes and not site.passes_on)
        self._sees_saved = site.hook_type is SAVED_TENSORS  # several tensors, each of which comes by itself
        self._takes_floats = spec.action.takes_tensor(torch.empty(0, device="cpu"), alone=True)
        self._form_is_checked = False  # shape and dtype of the first result
        self._function: Op = _takes_place if spec.action.acts_on_call else function_of(site)

    def _schedule(self) -> Callable[[], bool] | None:
        site = self.site
        when = site.spec.keys.when
        if site.spec.action.observes and not site.has_values:  # a trial run shows what it will see later
            when = when.model_copy(update={"step": None, "epoch": None, "probability": 1.0})
        return gate(when, site.clock, lambda: site.call, site.chance)

    @cached_property
    def _needs_paths(self) -> bool:
        """Whether an edit is told the path of each tensor, as observers are: for a batch dimension of its own."""
        spec = self.site.spec
        return spec.runs_own_functions or (spec.works_by_sample and not self.site.batch.is_uniform)

    @cached_property
    def _as_stored(self) -> bool:
        """Whether an edit gets tensors in their own dtype, also if torch does not compute in it."""
        site = self.site
        return (
            site.spec.runs_own_functions
            or site.hook_type.until_backward
            or "flipped" in site.spec.action.uses
        )

    @cached_property
    def _is_plain(self) -> bool:
        """Whether an edit acts on each tensor as a whole value."""
        site = self.site
        return site.spec.action.scope == "tensor" and site.target_keys is None and not self._needs_paths

    def op(self) -> Op:
        """What torch's hooks call for each value: `fire`, or a function that does the same for the plain case."""
        return self.site.sink.guard(self.site, self._fastest())

    def op_of_new(self) -> Op | None:
        """A faster `op` for outputs in new memory, or for gradients of tensor hooks; None: there is none.

        Nothing else refers to such an output, and only the backward pass to such a gradient.
        """
        kept = self._kept_in_memory()
        if kept is None:
            return None
        if self.site.hook_type.phase == "backward":
            return self._scheduled(kept.observer(self.site, self._act, references=OF_GRADIENT))
        return self._scheduled(kept.observer(self.site, self._act, new=True))

    def variant(self, hook: PlannedHook, seed: int) -> Op:
        """What another hook does at the same place in the same order, with its own counts and random draws."""
        site = self.site
        other = HookSite(
            hook, site.path, site.module, site.clock, site.sink, seed, site.calls, current=site.current
        )
        other.points = site.points
        return SiteRunner(other, for_other_ranks=self._for_other_ranks).op()

    def fire(self, value: Any) -> Any:
        """The value after the hook: the same object if nothing has changed.

        An action on the call itself returns True, whatever is given: it takes place.

        Raises only HookrunError: any other exception of an action becomes a HookError that names the hook.
        """
        if self._holds is not None and not self._holds():
            return value
        if self._waits_for_rows and self.site.clock.is_dummy_pass:
            return value
        if self._scaler is not None and self._scaler._scale is not None:
            return run_unscaled(
                self._act, value, self._scaler._scale
            )  # get_scale() would wait for the device
        return self._act(value)

    def _act(self, value: Any) -> Any:
        """Count the firing, and run the action."""
        self.site.fired += 1
        try:
            if self.site.spec.action.acts_on_call:
                return self._function(value)
            if self.site.spec.action.observes:
                self._observe(value)
                return value
            return self._edit(value)
        except PASSED_ON:
            raise
        except Exception as error:
            if isinstance(error, Absent) and self.site.spec.action.finds:
                self.site.found_nothing()
                return value
            is_observer = self.site.spec.action.observes
            if is_observer and self.site.has_values and _is_traced(value):
                return value  # there is nothing to observe, and tracing forbids some operations
            raise named(self.site, error, value) from error

    def _member(self, value: Any) -> Any:
        """The target in the value; the site notes that it is None."""
        if self.site.target_keys is None:
            return value
        member = containers.get(value, self.site.target_keys)
        if member is None:
            self.site.target_was_none = True
        return member

    # ---- observers -----------------------------------------------------------------------------------------------

    def _observe(self, value: Any) -> None:
        site = self.site
        action = site.spec.action
        if site.hook_type.phase == "backward" and are_batched():
            site.idle += 1
            warnings.warn(
                f"{site.where}: gradients are batched (is_grads_batched, vectorize=True): it observes none of them",
                HookrunWarning,
                stacklevel=2,
            )
            return
        if site.sink.muted:
            return
        seen = self._member(value)
        if seen is None and action.captures:
            site.found_nothing()
            if site.spec.keys.tokens is not None:  # there are no rows to keep
                return
        if site.hook_type.in_tuple and site.target_keys is None:
            seen = containers.unwrapped(seen)
        result = self._function(seen) if action.scope == "value" else self._observe_tensors(seen)
        if result is not None:  # it would be lost silently
            raise ValueError("the action declares `observes = True` and returns a value")

    def _observe_tensors(self, seen: Any) -> Any:
        """Give the action each tensor that it takes, until it returns something."""
        if self._takes_floats and isinstance(seen, Tensor) and seen.is_floating_point():  # the common case
            self.site.current.at = ""
            return self._function(seen)
        action = self.site.spec.action
        acted = False
        for path, leaf in containers.leaves(seen):
            if isinstance(leaf, Tensor) and action.takes_tensor(
                leaf, alone=leaf is seen and not self._sees_saved
            ):
                self.site.current.at = path
                acted = True
                result = self._function(leaf)
                if result is not None:
                    return result
        self.site.idle += not acted
        if not acted and isinstance(seen, Tensor) and not (self.site.has_values or self._sees_saved):
            action.require_tensor(seen)
        return None

    # ---- edits ---------------------------------------------------------------------------------------------------

    def _edit(self, value: Any) -> Any:
        """The value with what the action returns in the place of its tensors."""
        if (
            self._is_plain
            and self._form_is_checked
            and isinstance(value, Tensor)
            and value.dtype in _COMPUTED
        ):
            new = self._function(value)
            return value if new is None else self._checked(value, new)
        site = self.site
        member = self._member(value)
        takes = taken_by(site.spec.action, member, site.module)
        together = None
        if site.spec.action.scope == "together":
            together = iter(self._edited_together(member, takes))
        paths = dict[int, str]()
        if self._needs_paths:
            paths = {id(leaf): path for path, leaf in containers.leaves(member)}
        acted = False

        def edited(leaf: Any) -> Any:
            nonlocal acted
            if not takes(leaf):
                return leaf
            acted = True
            if self._needs_paths:
                site.current.at = paths.get(id(leaf), "")
            new = self._function(self._wide(leaf)) if together is None else next(together)
            return leaf if new is None else self._checked(leaf, new)

        changed = containers.rebuild(member, edited)
        site.idle += not acted
        if changed is member:
            return value
        return changed if site.target_keys is None else containers.put(value, site.target_keys, changed)

    def _edited_together(self, member: Any, takes: Callable[[Any], bool]) -> Any:
        """What the action returns for all tensors that it takes as one list."""
        olds = [self._wide(leaf) for leaf in containers.tensors(member) if takes(leaf)]
        return self._function(olds) if olds else ()

    def _wide(self, leaf: Tensor) -> Tensor:
        """The tensor in a dtype in which torch computes, unless the action gets it as it is stored."""
        return leaf if self._as_stored else widened(leaf)

    def _checked(self, old: Tensor, new: Any) -> Any:
        """The new tensor in the dtype of the old one, after its checks; the elements that have changed are counted."""
        if not self._as_stored and is_float8(old):
            new = new.to(old.dtype)
        if not self._form_is_checked:
            if self.site.hook_type.phase == "backward" and has_no_shape(old):
                raise RuntimeError("torch takes no other gradient for it")
            _require_same_form(old, new)
            self._form_is_checked = self.site.spec.action.scope != "together"
        if self.site.clock.counting:
            count(self.site, old, new)
        return new

    # ---- the plain case ------------------------------------------------------------------------------------------

    def _fastest(self) -> Op:
        """`fire`, or a function that does the same and asks less at each firing."""
        if self._needs_fire():
            return self.fire
        kept = self._kept_in_memory()
        if kept is not None:
            return self._scheduled(kept.observer(self.site, self._act))
        action = self.site.spec.action
        if action.observes or action.acts_on_call or not self._is_plain:
            return self._scheduled(self._act)
        return self._scheduled(self._plain_edit())

    def _needs_fire(self) -> bool:
        """Whether each firing asks if the pass is for other ranks, or for the scale of mixed precision's gradients."""
        return self._waits_for_rows or self._scaler is not None

    def _scheduled(self, act: Op) -> Op:
        """The op, run only when the schedule lets the hook fire."""
        holds = self._holds
        if holds is None:
            return act

        def act_if_due(value: Any) -> Any:
            return act(value) if holds() else value

        return act_if_due

    def _kept_in_memory(self) -> KeptInMemory | None:
        """The action of a capture that copies whole values into memory; None for any other hook."""
        function = self._function
        if not isinstance(function, KeptInMemory) or self._needs_fire():
            return None
        if self.site.target_keys is not None or self.site.hook_type.in_tuple:
            return None
        return function

    def _plain_edit(self) -> Op:
        """`_act` of an edit of whole tensors, without its questions once the first result was checked."""
        site = self.site
        clock = self.site.clock
        function = self._function

        def edit(value: Any) -> Any:
            is_plain = isinstance(value, Tensor) and value.dtype in _COMPUTED
            if not is_plain or not self._form_is_checked or clock.counting:
                return self._act(value)
            site.fired += 1
            try:
                new = function(value)
            except PASSED_ON:
                raise
            except Exception as error:
                raise named(site, error, value) from error
            if new is None:
                return value
            return new

        return edit


def _takes_place(decided: bool) -> bool:
    """The function of an action on the call itself, whatever is given."""
    return True


def function_of(site: HookSite) -> Op:
    """The action's function, applied to the part that `index`, `tokens` and `heads` select."""
    spec = site.spec
    action = spec.action
    part = site.part
    if "flipped" in action.uses:  # faults are listed by their place in the whole tensor, with the batch first
        needs_batch = spec.chooses_samples or action.works_by_sample
        is_first = site.batch.is_first or not site.hook_type.batch
        part = None if is_first else BatchFirst(None, site.batch, site.current, required=needs_batch)
    function = action.build(site)
    if action.observes:
        if spec.chooses_samples:
            function = observer_of_samples(site, function)
    elif action.scope == "tensor":
        if site.hook_type.on == "reading":
            function = _straight_through(function)
        may_change_form = spec.runs_own_functions or "args" in action.uses
        if may_change_form or part is not None or spec.chooses_samples:
            function = _in_same_form(function)
        if spec.chooses_samples:
            function = edit_of_samples(site, function)
    if part is not None:
        function = _on_part(site, function, part)
    if site.passes_on:
        function = _passing_on(site, function)
    return function


def _passing_on(site: HookSite, capture: Op) -> Op:
    """The capture, which passes on what it sees to other hooks; in a pass for other ranks it stores nothing."""

    def capture_and_pass(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise ValueError(
                f"another hook takes the value, a {type(value).__name__}: name one tensor by `target`"
            )
        require_no_checkpoint()
        seen = value
        if site.passed_part is not None:
            seen = site.passed_part.of(value)
        # a copy, since it may be written in place later
        site.clock.calls.forward.passed_on[site.hook_name, site.path] = seen.clone()
        return None if site.clock.is_dummy_pass else capture(value)

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


def named(site: HookSite, error: Exception, value: Any) -> HookError:
    """The error that names the hook in which another one was raised, for a value."""
    if isinstance(error, RuntimeError):
        if any(tensor.is_nested for tensor in containers.tensors(value)):
            return HookError(f"{site.where}: {NOT_NESTED}")
        # beside a sparse tensor, which torch names, another one may be what is wrong
        is_sparse = any(tensor.layout is not torch.strided for tensor in containers.tensors(value))
        if is_sparse and "sparse" in str(error).lower():
            return HookError(f"{site.where}: {_NOT_SPARSE}")
    keys = site.spec.keys
    if isinstance(error, containers.TargetError) and keys.target is not None:
        return HookError(f"{site.where}: target {keys.target}: {error}")
    if isinstance(error, IndexError) and keys.index:
        return HookError(f"{site.where}: index {keys.index}: {error}")
    return HookError(f"{site.where}: {error}")


def are_batched() -> bool:
    """Whether the gradients of this backward pass stand for several each, which torch cannot copy, detach or read."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_MODE_OF_BATCHES)


def acts_on(leaf: Any) -> bool:
    """Whether it is a floating-point or complex tensor, the kind that actions apply to."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def taken_by(action: Action, value: Any, module: nn.Module) -> Callable[[Any], bool]:
    """A predicate: whether the action acts on a member of the value."""
    taken = action.taken(value, module)
    if taken is not None:
        chosen = list(taken.values())
        return lambda leaf: any([leaf is each for each in chosen])
    return _is_tensor if action.any_dtype else acts_on


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _is_traced(value: Any) -> bool:
    """Whether a tensor of the value has no data because the model is being traced."""
    return any(not tensor.is_meta and readable(tensor) is None for tensor in containers.tensors(value))


def count(site: HookSite, old: Tensor, new: Tensor | Packed) -> None:
    """Add to the site's counts of changed elements, without waiting for the device."""
    if isinstance(new, Tensor) and not are_batched():  # a `Packed` saved tensor is not comparable
        old = old.detach()
        after = new.detach()
        if site.part is not None:
            if site.part.nothing_of(old):
                return
            old = site.part.of(old)
            after = site.part.of(after)
        old = elements(old)
        after = elements(after)
        changed = (after != old) & ~(after.isnan() & old.isnan())
        if (total := readable(changed)) is None:  # the model is being traced
            return
        with torch._C._DisableFuncTorch():
            site.changed = site.changed + total.sum()
        site.total += total.numel()


# ---- index, tokens, heads --------------------------------------------------------------------------------------


def _on_part(site: HookSite, function: Op, part: TensorPart) -> Op:
    scope = site.spec.action.scope
    observes = site.spec.action.observes
    # of an observer detached: autograd would save an index, and activation checkpointing counts what is saved
    of = (lambda tensor: part.of(tensor.detach())) if observes else part.of
    if scope == "value":
        if site.spec.keys.tokens is not None:
            return _observer_of_tokens(site, function, of)
        return lambda value: function(copied(value, _with_path(site, value, of)))
    if scope == "together":
        edit = _edit_parts_together if site.spec.action.mixes_rows else _keep_parts_together
        return partial(edit, function, part)

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
        before = current.whole
        current.whole = tensor
        try:
            return act_on_part(tensor)
        finally:
            current.whole = before

    return edit_within


def _edit_parts_together(function: Op, part: TensorPart, olds: list[Tensor]) -> list[Tensor]:
    parts = [part.of(old) for old in olds]
    news = function(parts)
    return [part.put(old, new) for old, new in zip(olds, news, strict=True)]


def _keep_parts_together(function: Op, part: TensorPart, olds: list[Tensor]) -> list[Tensor | None]:
    """The parts of what the action returns for the whole tensors, of which it computes each row by itself."""
    kept: list[Tensor | None] = []
    for old, new in zip(olds, function(olds), strict=True):
        kept.append(None if new is None else part.put(old, part.of(new)))
    return kept


def _with_path(site: HookSite, value: Any, of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function of a tensor of the value; the current firing has the tensor's path meanwhile."""
    if isinstance(value, Tensor) or site.batch.is_uniform:
        return of
    paths = {id(leaf): path for path, leaf in containers.leaves(value)}
    current = site.current

    def of_tensor(tensor: Tensor) -> Tensor:
        before = current.at
        current.at = paths.get(id(tensor), "")
        try:
            return of(tensor)
        finally:
            current.at = before

    return of_tensor


def _observer_of_tokens(site: HookSite, function: Op, of: Callable[[Tensor], Tensor]) -> Op:
    """An observer of whole values under `tokens`; all tensors of a value must have rows for the same positions."""

    def observe(value: Any) -> Any:
        chosen: dict[int, Any] = {}

        def rows(tensor: Tensor) -> Tensor:
            taken = of(tensor)
            of_tensor = site.current.chosen
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


def run_unscaled(op: Op, value: Any, scale: Tensor) -> Any:
    """Divide the value by the scale, apply the op and multiply the result by the scale again.

    The op gets 16-bit gradients as 32-bit ones: in 16 bits small unscaled gradients would underflow.
    """
    plain = containers.rebuild(value, partial(unscaled_leaf, scale))
    new = op(plain)
    if new is plain:
        return value
    pairs = zip(containers.members(value), containers.members(plain), strict=True)

    def rescaled(leaf: Any) -> Any:
        old, seen = next(pairs)
        return old if leaf is seen else (leaf * scale).to(old.dtype)

    return containers.rebuild(new, rescaled)


def unscaled_leaf(scale: Tensor, leaf: Any) -> Any:
    """A gradient divided by the scale; any other member of a value as it is."""
    return computable(leaf) / scale if isinstance(leaf, Tensor) else leaf
