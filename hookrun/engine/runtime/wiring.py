"""Registers a plan's hooks on a model, module by module as `Module.apply`, and removes them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar, cast

from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookrun.engine.actions.user_code import may_draw
from hookrun.engine.hook_types import OPTIMIZER_STEP_POST, OPTIMIZER_STEP_PRE, HookType
from hookrun.engine.plan.model_tree import children_first, class_name, parametrized, unhookable_model
from hookrun.engine.plan.plan import SHOWN, Match, PlannedHook, ResolvedPlan, passed_on, uncompilable
from hookrun.engine.runtime.apply_action import Op, compose, unscaled
from hookrun.engine.runtime.call_stack import CallFunction, Calls, with_callers
from hookrun.engine.runtime.clock import Clock, gate
from hookrun.engine.runtime.compiled import in_graph_of, refusal
from hookrun.engine.runtime.fast.direct_calls import call_through_torch
from hookrun.engine.runtime.hooks.base import (
    BoundHook,
    ModuleHook,
    ParameterHook,
    RegisteredHook,
    Shared,
    listen,
    registered_hooks,
)
from hookrun.engine.runtime.hooks.calls import Skip, Stop
from hookrun.engine.runtime.hooks.installation import AtInstallation
from hookrun.engine.runtime.hooks.optimizer_step import OptimizerSteps
from hookrun.engine.runtime.hooks.parameter_grad import KeptZero
from hookrun.engine.runtime.optimizers import follow
from hookrun.engine.runtime.part import part_of
from hookrun.engine.runtime.reduced import GradientsOfWrapped, ReducedGradients
from hookrun.engine.runtime.sharded import (
    HookedParameters,
    is_sharded,
    move_inside_sharding,
    sharded_too_early,
)
from hookrun.engine.runtime.site import HookSite, Sink
from hookrun.engine.runtime.tokens.sequences import Sequences
from hookrun.engine.values.tensors import ordinary_tensors
from hookrun.errors import CompileError, HookrunError, Problem, listed, refuse

R = TypeVar("R", bound=RegisteredHook)

Variant = Callable[[PlannedHook, int], Op]
"""(another hook, seed) -> what it does at the same place in the same order, with its own counts and random draws."""

Around = Callable[[HookSite, Op, Variant], Op]
"""(site, its op, variant) -> the op that takes its place."""


class Wiring:
    """The registered hooks of one plan on one model.

    sites:     one for each hook and module or parameter, in the order of installation
    hooked:    the hooked parameters
    closing:   the callbacks to run when the hooks are removed

    restored: the identities of the hooks that had changed the model when its present state was saved
    reduced:  runs the hooks on parameter gradients after they were summed over several ranks; None: torch runs them
    around:   called for each site; what it returns runs in place of the site's op
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        model: nn.Module,
        clock: Clock,
        sink: Sink,
        restored: Collection[str] = (),
        reduced: ReducedGradients | None = None,
        around: Around | None = None,
    ) -> None:
        self.plan = plan
        self.clock = clock
        self._around = around
        self.sink = sink
        self.sites = list[HookSite]()
        problems = uncompilable(plan)
        self._refused, self._compiles = refusal(problems), not problems
        self._model = model
        self._restored = restored
        self._reduced = reduced
        self._shared = Shared(model, clock.calls)
        self.closing = self._shared.closing
        self._handles = list[RemovableHandle]()
        self.hooked = HookedParameters(model)
        self._zeros = dict[int, KeptZero]()
        self._passing = passed_on(plan.hooks)
        tracks_calls = sink.wants_calls or any(h.spec.keys.when.call is not None for h in plan.hooks)
        self._of_calls = {hook.spec.name for hook in plan.hooks if tracks_calls or _needs_calls(hook)}

    def install(self) -> None:
        """Register all hooks. Raises CompileError, before the first one, if the plan was made for another model."""
        model = self._model
        modules = dict(model.named_modules(remove_duplicate=False))
        self._require_same_model(modules)
        self._run_at_installation(modules)
        if any(hook.spec.keys.tokens is not None for hook in self.plan.hooks):
            self.clock.passes = Sequences(model, self.clock.calls)
        with ordinary_tensors():
            self._install_on_modules(modules)
            self._install_on_parameters(modules)
        self._watch()
        move_inside_sharding(model, {handle.id for handle in self._handles})

    def _watch(self) -> None:
        """Follow the calls of the modules that need it, and of those around them, outside all other hooks."""
        stack, passes = self.clock.calls, self.clock.passes
        everywhere = [self._model, *(site.module for site in self.sites)]
        numbers: dict[nn.Module, Calls | None] = dict.fromkeys(everywhere if stack.begins else ())
        numbers |= {site.module: site.calls for site in self.sites if site.calls is not None}
        reads = defaultdict[nn.Module, list[CallFunction]](list)
        for module, read in passes.readers() if passes is not None else ():
            reads[module].append(read)
        followed = with_callers(self._model, [*numbers, *reads], around=self._shared.ending)
        for module in followed.values():
            enter = partial(stack.enter, module, numbers.get(module), reads[module])
            self.listen(module, enter, prepend=True, with_kwargs=True)
            self.listen(module, stack.leave, after=True, always_call=True)
        call_through_torch(followed.values())

    def listen(self, module: nn.Module, function: Callable[..., object], **options: bool) -> RemovableHandle:
        """Register a function of the module's calls that changes nothing, until the hooks are removed."""
        handle = listen(module, function, **options)
        self._handles.append(handle)
        return handle

    def _require_same_model(self, modules: Mapping[str, nn.Module]) -> None:
        """Raise CompileError if the plan was made for another model, or if the model has been compiled since."""
        if (reason := unhookable_model(self._model)) is not None:
            raise CompileError([Problem("model", reason.what, reason.hint)])
        problems, added = [], set(self.plan.added())
        elsewhere = defaultdict[str, list[str]](list)
        for hook, match in self._planned():
            # the hooked module, or the one that owns the hooked parameter
            of_parameter = hook.spec.hook_type.on_parameters
            owner, _, name = match.path.rpartition(".") if of_parameter else (match.path, "", "")
            module = modules.get(owner)
            if module is None or class_name(module) != match.type:
                present = "nothing" if module is None else f"a {class_name(module)}"
                what = f"a {match.type} at {owner or '(root)'}, this model has {present} there"
            elif name and not (
                module._parameters.get(name) is not None
                or name in parametrized(module)
                or (owner, name) in added
            ):
                what = f"the parameter {match.path}, which this model does not have"
            else:
                changes = of_parameter or hook.spec.hook_type.phase == "installation" or hook.added
                own = module.parameters(recurse=not of_parameter) if changes and self.sink.has_values else ()
                if any(parameter.is_meta for parameter in own):
                    elsewhere[hook.spec.where].append(match.path or "(root)")
                continue
            problems.append(
                Problem(hook.spec.where, f"the plan is for {what}", "compile the spec against this model")
            )
        problems += sharded_too_early(self.plan, self._model)
        problems += [
            Problem(
                where,
                f"the parameters of {listed(paths, SHOWN)} lie on the meta device: the forward gets their values from "
                "elsewhere (offloaded to the CPU or a disk), where no hook sees them",
                "hook the module's forward, or load the model without offloading",
            )
            for where, paths in elsewhere.items()
        ]
        refuse(problems, CompileError)

    def _planned(self, *kinds: type[RegisteredHook]) -> Iterable[tuple[PlannedHook, Match]]:
        """Each hook with each of its matches; only hooks that are registered as one of `kinds`, if any are given."""
        for hook in self.plan.hooks:
            if not kinds or issubclass(registered_hooks()[hook.spec.hook_type], kinds):
                yield from ((hook, match) for match in hook.matches)

    # ---- sites and firings -------------------------------------------------------------------------------------

    def _site(self, hook: PlannedHook, path: str, module: nn.Module, calls: Calls | None = None) -> HookSite:
        site = HookSite(hook, path, module, self.clock, self.sink, self.plan.seed, calls)
        if (hook.spec.name, path) in self._passing:
            site.passes_on, site.passed_part = True, part_of(hook, path, site.current, site.batch)
        self.sites.append(site)
        return site

    def _register(self, kind: type[R], sites: Sequence[HookSite]) -> R:
        """The object whose methods are registered with torch for these sites."""
        registered = kind([self._firing(site) for site in sites], self._shared)
        self.closing.callback(registered.clear)
        return registered

    def _firing(self, site: HookSite) -> BoundHook:
        op, op_of_new = self._ops(site)
        inside = self._compiles and site.hook_type.in_graph
        traced = in_graph_of(site) if inside else self._refused
        if self._around is None:
            return BoundHook(site, op, traced, op_of_new)

        def variant(hook: PlannedHook, seed: int) -> Op:
            place = hook, site.path, site.module, self.clock, self.sink, seed, site.calls
            return self._ops(HookSite(*place, current=site.current))[0]

        return BoundHook(site, self._around(site, op, variant), traced)

    def _ops(self, site: HookSite) -> tuple[Op, Op | None]:
        """What the site does to a value, schedule included; and a faster version for new tensors, if there is one."""
        when = site.spec.keys.when
        if not site.has_values and site.spec.action.observes:  # a trial run shows what it will see later
            when = when.model_copy(update={"step": None, "epoch": None, "probability": 1.0})
        open_gate = gate(when, self.clock, lambda: site.call, site.chance)

        def finished(op: Op) -> Op:
            if site.hook_type.phase == "backward" and self.clock.scaler is not None:
                op = unscaled(op, self.clock.scaler)
            op = self.sink.guard(site, op)
            if self._reduced is not None and self._reduced.stands_in and site.hook_type.of_rows:
                op = partial(_of_own_rows, op, self.clock, site)
            return op if open_gate is None else lambda value: op(value) if open_gate() else value

        op, op_of_new = compose(site)
        return finished(op), None if op_of_new is None else finished(op_of_new)

    # ---- modules -----------------------------------------------------------------------------------------------

    def _run_at_installation(self, modules: Mapping[str, nn.Module]) -> None:
        """Run each `apply` hook once on each of its modules."""
        for hook in self.plan.hooks:
            if hook.spec.hook_type.phase != "installation":
                continue
            matches = {id(modules[match.path]): match for match in hook.matches}
            restored = hook.spec.identity in self._restored
            for module in children_first(self._model):
                if (match := matches.pop(id(module), None)) is None:  # a shared module comes several times
                    continue
                spec = replace(hook.spec, action=hook.spec.action_on(match.matched_parameters))
                site = self._site(replace(hook, spec=spec), match.path, module)
                site.zeros_of = partial(self._zeros_of, match.path, module)
                AtInstallation.run(module, site, restored=restored)
                del site.zeros_of  # a reference cycle

    def _install_on_modules(self, modules: Mapping[str, nn.Module]) -> None:
        by_module = defaultdict[int, list[tuple[PlannedHook, Match]]](list)
        for hook, match in self._planned(ModuleHook):
            owner = match.path.rpartition(".")[0] if hook.spec.hook_type.on_parameters else match.path
            by_module[id(modules[owner])].append((hook, match))
        for module in children_first(self._model):
            if planned := by_module.pop(id(module), []):
                self._install_on(module, planned)

    def _install_on(self, module: nn.Module, planned: Sequence[tuple[PlannedHook, Match]]) -> None:
        """Install the hooks of one module, one callable per type; those of greater depth run closer to the forward."""
        calls: Calls | None = None
        if any(hook.spec.name in self._of_calls for hook, _ in planned):
            calls = Calls(self.clock.calls, self.clock.tokens)
        by_kind = defaultdict[type[ModuleHook], list[HookSite]](list)
        for hook, match in planned:
            action = hook.spec.action
            kind = cast(type[ModuleHook], registered_hooks()[hook.spec.hook_type])
            kind = Skip if action.does == "skip" else Stop if action.does == "stop" else kind
            by_kind[kind].append(self._site(hook, match.path, module, calls))
        outermost_first = [
            self._register(kind, by_kind[kind]) for kind in sorted(by_kind, key=attrgetter("depth"))
        ]
        for registered in outermost_first:
            self._handles += registered.before(module)
        for registered in reversed(outermost_first):
            self._handles += registered.after(module)
        if len(outermost_first) == 1 and calls is None:
            undo = outermost_first[0].call_directly(module, self._handles[-1].id)
            if undo is not None:
                self.closing.callback(undo)

    # ---- parameters --------------------------------------------------------------------------------------------

    def _install_on_parameters(self, modules: Mapping[str, nn.Module]) -> None:
        on_gradients = defaultdict[tuple[str, HookType], list[HookSite]](list)
        on_steps = list[HookSite]()
        for hook, match in self._planned(ParameterHook, OptimizerSteps):
            owner = match.path.rpartition(".")[0]
            site = self._site(hook, match.path, modules[owner])
            self.hooked.add(match.path, modules[owner])
            if hook.spec.hook_type.on == "optimizer":
                on_steps.append(site)
            else:
                on_gradients[match.path, hook.spec.hook_type].append(site)
        gradients: ReducedGradients | GradientsOfWrapped | None = self._reduced
        if self._reduced is None and distributed.is_available() and distributed.is_initialized():
            gradients = self._gradients_of_ranks()
        if self._zeros:
            self._keep_zeros(gradients)
        if self.hooked.places:
            self.closing.callback(follow(before=self.hooked.follow))
        for (path, hook_type), sites in on_gradients.items():
            place = self.hooked.places[path]
            if not place.parameter.requires_grad:
                raise HookrunError(f"{sites[0].where}: the parameter does not require a gradient")
            registered = self._register(cast(type[ParameterHook], registered_hooks()[hook_type]), sites)
            if self._reduced is None and not is_sharded(place.parameter):
                # torch never calls tensor hooks of a sharded parameter
                self._handles.append(registered.register(place.parameter))
            if gradients is not None:
                gradients.add(place, registered)
        if on_steps:
            steps = self._register(OptimizerSteps, on_steps)
            steps.places = [self.hooked.places[site.path] for site in on_steps]
            self.closing.callback(
                follow(partial(steps.run, OPTIMIZER_STEP_PRE), partial(steps.run, OPTIMIZER_STEP_POST))
            )
        if self._zeros:  # after the hooks that edit parameters
            self.closing.callback(follow(after=self._fill_stepped))

    # ---- elements that stay 0 ----------------------------------------------------------------------------------

    def _zeros_of(self, path: str, module: nn.Module, name: str) -> KeptZero:
        """What keeps elements of a parameter of the module at 0, one object for all hooks."""
        place = self.hooked.add(f"{path}.{name}".lstrip("."), module)
        return self._zeros.setdefault(id(place.parameter), KeptZero(place))

    def _keep_zeros(self, gradients: ReducedGradients | GradientsOfWrapped | None) -> None:
        self.clock.calls.begins.append(self._fill_changed)
        for zeros in self._zeros.values():
            if zeros.place.parameter.requires_grad:
                self._handles.append(zeros.register(zeros.place.parameter))
            if gradients is not None:
                gradients.add(zeros.place, zeros)

    def _fill_changed(self, *call: object) -> None:
        for zeros in self._zeros.values():
            if zeros.is_changed:
                zeros.fill()

    def _fill_stepped(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        mine = set(map(id, parameters))
        for zeros in self._zeros.values():
            # without a gradient the step leaves the parameter as it is, and a graph may still need it
            parameter = zeros.place.parameter
            if id(parameter) in mine and (parameter.grad is not None or zeros.is_changed):
                zeros.fill()

    def _gradients_of_ranks(self) -> GradientsOfWrapped | None:
        """For a user's own loop that may wrap the model in DDP or fully_shard; None if no parameter is concerned."""
        added = tuple(self.plan.added())
        if not (self.hooked.places or added):
            return None
        gradients = GradientsOfWrapped(self._model, self.hooked, added)
        self.closing.callback(gradients.clear)
        self.clock.calls.begins.append(gradients.forward_begins)
        self.clock.calls.ends.append(gradients.forward_ended)
        return gradients

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block none of these hooks runs in a forward pass; hooks registered by others still do.

        Changes by `apply` hooks stay in the model.
        """
        ours = {handle.id for handle in self._handles}
        kept: list[tuple[dict[int, Any], dict[int, Any]]] = [
            (registered, dict(registered))
            for module in self._model.modules()
            for registered in (module._forward_pre_hooks, module._forward_hooks)
            if not ours.isdisjoint(registered)
        ]
        try:
            for registered, before in kept:
                for number in ours & before.keys():
                    del registered[number]
            yield
        finally:
            for registered, before in kept:
                added = {number: hook for number, hook in registered.items() if number not in before}
                registered.clear()
                registered.update(before | added)  # each at its old position

    def remove(self) -> None:
        """Remove every hook of this installation, and nothing else. Changes by `apply` hooks stay in the model."""
        while self._handles:
            self._handles.pop().remove()
        self._zeros.clear()
        self.hooked.places.clear()
        self.clock.passes = None
        self.clock.calls.drop_ended()
        self.clock.calls.begins.clear()
        self.clock.calls.ends.clear()
        self.clock.in_graphs.clear()  # breaks reference cycles: their functions refer to the clock
        self.closing.close()


def _needs_calls(hook: PlannedHook) -> bool:
    """Whether the calls are followed: a recomputation is identified by them, a value is of the same forward."""
    spec = hook.spec
    draws = spec.draws_in_forward
    if draws and hook.functions and spec.keys.when.probability == 1:
        draws = may_draw(hook.functions.values())
    return draws or spec.keys.tokens is not None or bool(passed_on([hook]))


def _of_own_rows(op: Op, clock: Clock, site: HookSite, value: Any) -> Any:
    """Run the op; in a pass that this rank makes for other ranks only, run it only if it edits in the forward pass.

    The gradients of such a pass are all zero, so observers and edits of gradients are left out.
    """
    only_observes = site.spec.action.observes and not site.passes_on
    idle = clock.stands_in and (only_observes or site.hook_type.phase == "backward")
    return value if idle else op(value)
