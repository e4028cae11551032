"""Registers a plan's hooks on a model, module by module as `Module.apply`, and removes them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookrun.engine.actions.user_code import may_draw
from hookrun.engine.hook_types import (
    FORWARD,
    FORWARD_PRE,
    OPTIMIZER_STEP_POST,
    OPTIMIZER_STEP_PRE,
    OUTPUT_GRAD,
    HookType,
)
from hookrun.engine.plan.model_tree import children_first, class_name, parametrized, unhookable_model
from hookrun.engine.plan.plan import (
    SHOWN,
    Match,
    PlannedHook,
    ResolvedPlan,
    passed_on,
    uncompilable,
    unexportable,
)
from hookrun.engine.plan.points import Point, point_path
from hookrun.engine.runtime.apply_action import Op, SiteRunner
from hookrun.engine.runtime.call_stack import CallFunction, Calls, CallStack, forget, with_callers
from hookrun.engine.runtime.clock import Clock
from hookrun.engine.runtime.compiled import in_graph_of, refusal
from hookrun.engine.runtime.fast import direct_calls
from hookrun.engine.runtime.fast.direct_calls import call_through_torch
from hookrun.engine.runtime.graph_observers import GraphObservers
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
from hookrun.engine.runtime.sinks import Sink
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.tokens.sequences import Sequences
from hookrun.engine.values.tensors import ordinary_tensors
from hookrun.errors import CompileError, HookrunError, Problem, listed, refuse

R = TypeVar("R", bound=RegisteredHook)

ReplaceOp = Callable[[SiteRunner], Op]
"""The runner of a site -> the op that takes the place of the runner's own."""


_KINDS_OF_CALL: Mapping[str | None, type[ModuleHook]] = {"skip": Skip, "stop": Stop}
"""What an action does with its call -> the class that registers it, whatever its hook type."""


class _HookHere(NamedTuple):
    """A hook at a module, or at a parameter of it, and the class that registers it."""

    kind: type[ModuleHook]
    hook: PlannedHook
    path: str


def _owner(hook_type: HookType, match: Match) -> str:
    """The path of the hooked module, or of the one that owns the hooked parameter."""
    if not hook_type.on_parameters:
        return match.path
    return match.path.rpartition(".")[0]


class Wiring:
    """The registered hooks of one plan on one model.

    sites:     one for each hook and module or parameter, in the order of installation
    hooked:    the hooked parameters
    wrapped:   runs their hooks in a user's own loop over several ranks; None: torch runs them
    closing:   the callbacks to run when the hooks are removed
    points:    path -> what an action adds at a module for other hooks; it is not part of the model

    restored: the identities of the hooks that had changed the model when its present state was saved
    reduced:  runs the hooks on parameter gradients after they were summed over several ranks; None: torch runs them
    replace_op: called for each site; what it returns runs in place of the site's op
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        model: nn.Module,
        clock: Clock,
        sink: Sink,
        restored: Collection[str] = (),
        reduced: ReducedGradients | None = None,
        replace_op: ReplaceOp | None = None,
    ) -> None:
        self.plan = plan
        self.clock = clock
        self._replace_op = replace_op
        self.sink = sink
        self.sites = list[HookSite]()
        problems = uncompilable(plan)
        self._refused = refusal(problems)
        self._compiles = not problems
        self.observers = GraphObservers(clock, sink, refusal(unexportable(plan)))
        self._model = model
        self._restored = restored
        self._reduced = reduced
        self._shared = Shared(model, clock.calls)
        self.closing = self._shared.closing
        self._handles = list[RemovableHandle]()
        self._followed = list[nn.Module]()
        self._registered = list[RegisteredHook]()
        self._direct_calls = list[tuple[nn.Module, object]]()
        self.hooked = HookedParameters(model)
        self.wrapped: GradientsOfWrapped | None = None
        self._zeros = dict[int, KeptZero]()
        self._passing = passed_on(plan.hooks)
        self.points: dict[str, nn.Module] = {path: Point() for hook in plan.hooks for path in hook.points}
        self._points_at = defaultdict[int, list[nn.Module]](list)
        tracks_calls = sink.wants_calls or any(h.spec.keys.when.call is not None for h in plan.hooks)
        self._of_calls = {hook.spec.name for hook in plan.hooks if tracks_calls or _needs_calls(hook)}
        self._recorded = set[str]()
        if sink.counts_calls:
            self._recorded = {hook.spec.name for hook in plan.hooks if _numbers_records(hook)}

    def install(self) -> None:
        """Register all hooks. Raises CompileError, before the first one, if the plan was made for another model."""
        model = self._model
        modules = {**dict(model.named_modules(remove_duplicate=False)), **self.points}
        self._require_same_model(modules)
        for hook in self.plan.hooks:
            for point, path in hook.points.items():
                self._points_at[id(modules[path])].append(self.points[point])
        self._run_at_installation(modules)
        if any(hook.spec.keys.tokens is not None for hook in self.plan.hooks):
            self.clock.passes = Sequences(model, self.clock.calls)
        self.closing.callback(self._clear_registered)
        with ordinary_tensors():
            self._install_on_modules(modules)
            self._install_on_parameters(modules)
        self._watch()
        hooked = [*(site.module for site in self.sites), *self._followed]
        move_inside_sharding(hooked, {handle.id for handle in self._handles})

    def _watch(self) -> None:
        """Follow the calls of the modules that need it, and of those around them, outside all other hooks."""
        stack = self.clock.calls
        passes = self.clock.passes
        everywhere = [self._model, *(site.module for site in self.sites)]
        numbers: dict[nn.Module, Calls | None] = dict.fromkeys(everywhere if stack.begins else ())
        followed_sites = [site for site in self.sites if not site.counts_calls]
        numbers |= {site.module: site.calls for site in followed_sites if site.calls is not None}
        reads = defaultdict[nn.Module, list[CallFunction]](list)
        for module, read in passes.readers() if passes is not None else ():
            reads[module].append(read)
        counting = [site for site in self.sites if site.counts_calls]
        inner = [*self._shared.ending, *(site.module for site in counting)]
        if not numbers and not reads and not inner:
            return
        if counting:
            stack.begins.append(partial(_note_fired, stack, counting))
        followed = with_callers(self._model, [*numbers, *reads], inner=inner, points=self._points_at)
        in_graph = None  # where no call is followed
        if self.wrapped is not None:
            in_graph = self.observers.calling(self.wrapped.forward_begins)
        for module in followed.values():
            enter = partial(stack.enter, module, numbers.get(module), reads[module])
            traced = in_graph if module is self._model else None
            self.listen(module, enter, prepend=True, traced=traced, with_kwargs=True)
            self.listen(module, stack.leave, after=True, always_call=True)
        call_through_torch(followed.values())

    def listen(self, module: nn.Module, function: Callable[..., object], **options: Any) -> RemovableHandle:
        """Register a function of the module's calls that changes nothing, until the hooks are removed."""
        handle = listen(module, function, **options)
        self._followed.append(module)
        self._handles.append(handle)
        return handle

    def _require_same_model(self, modules: Mapping[str, nn.Module]) -> None:
        """Raise CompileError if the plan was made for another model, or if the model has been compiled since."""
        if (reason := unhookable_model(self._model)) is not None:
            raise CompileError([Problem("model", reason.what, reason.hint)])
        added = set(self.plan.added())
        problems: list[Problem] = []
        elsewhere: dict[str, list[str]] = {}
        for hook in self.plan.hooks:
            kind = hook.spec.hook_type
            changes = kind.on_parameters or kind.phase == "installation" or bool(hook.added)
            needs_data = changes and self.sink.has_values
            for match in hook.matches:
                module = modules.get(_owner(kind, match))
                what = _misplaced(kind, match, module, added)
                if what is not None:
                    step = "compile the spec against this model"
                    problems.append(Problem(hook.spec.where, f"the plan is for {what}", step))
                elif needs_data and module is not None and _lies_elsewhere(module, kind):
                    elsewhere.setdefault(hook.spec.where, []).append(match.path or "(root)")
        problems += sharded_too_early(self.plan, self._model)
        for where, paths in elsewhere.items():
            problems.append(
                Problem(
                    where,
                    f"the parameters of {listed(paths, SHOWN)} lie on the meta device: the forward gets their values "
                    "from elsewhere (offloaded to the CPU or a disk), where no hook sees them",
                    "hook the module's forward, or load the model without offloading",
                )
            )
        refuse(problems, CompileError)

    # ---- sites and firings -------------------------------------------------------------------------------------

    def _site(self, hook: PlannedHook, path: str, module: nn.Module, calls: Calls | None = None) -> HookSite:
        site = HookSite(hook, path, module, self.clock, self.sink, self.plan.seed, calls)
        for name in hook.spec.action.points:
            site.points[name] = self.points[point_path(path, hook.spec.name, name)]
        if hook.spec.name in self._recorded and calls is None:
            site.counts_calls = not self._is_called_once(hook, path)
            if site.counts_calls and site.hook_type is OUTPUT_GRAD:
                site.calls = Calls(self.clock.calls, self.clock.tokens)
        if (hook.spec.name, path) in self._passing:
            site.passes_on = True
            site.passed_part = part_of(hook, path, site.current, site.batch)
        self.sites.append(site)
        return site

    def _follows_calls(self, hook: PlannedHook, path: str) -> bool:
        """Whether the hook needs each call of the module to be followed from its beginning to its end."""
        name = hook.spec.name
        if name in self._of_calls:
            return True
        is_recorded = name in self._recorded and hook.spec.hook_type not in _COUNTED
        return is_recorded and not self._is_called_once(hook, path)

    def _is_called_once(self, hook: PlannedHook, path: str) -> bool:
        """Whether each forward calls the module once: it has one name, and all modules around it are Sequential."""
        if path in self.points or any(match.path == path and len(match.names) > 1 for match in hook.matches):
            return False
        while path:
            path = path.rpartition(".")[0]
            around = self._model.get_submodule(path)
            if type(around) is not nn.Sequential or "forward" in vars(around):
                return False
        return True

    def _register(self, kind: type[R], sites: Sequence[HookSite]) -> R:
        """The object whose methods are registered with torch for these sites."""
        registered = kind([self._firing(site) for site in sites], self._shared)
        self._registered.append(registered)
        return registered

    def _clear_registered(self) -> None:
        for module, call in self._direct_calls:
            direct_calls.end(module, call)
        self._direct_calls.clear()
        for registered in self._registered:
            registered.clear()
        self._registered.clear()

    def _firing(self, site: HookSite) -> BoundHook:
        runner = SiteRunner(
            site, for_other_ranks=self._reduced is not None and self._reduced.needs_dummy_passes
        )
        traced = self._refused
        if self._compiles and site.hook_type.in_graph:
            observes = site.spec.action.observes
            traced = (
                self.observers.add(site) if observes else in_graph_of(site, self.observers.counting(site))
            )
        if self._replace_op is not None:
            return BoundHook(site, self._replace_op(runner), traced)
        return BoundHook(site, runner.op(), traced, runner)

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
        by_module: dict[int, list[_HookHere]] = {}
        for hook in self.plan.hooks:
            hook_type = hook.spec.hook_type
            kind = registered_hooks()[hook_type]
            if not issubclass(kind, ModuleHook):
                continue
            kind = _KINDS_OF_CALL.get(hook.spec.action.does, kind)
            for match in hook.matches:
                module = modules[_owner(hook_type, match)]
                by_module.setdefault(id(module), []).append(_HookHere(kind, hook, match.path))
        for module in children_first(self._model, self._points_at):
            here = by_module.pop(id(module), None)
            if here is not None:
                self._install_on(module, here)
            if not by_module:
                return

    def _install_on(self, module: nn.Module, here: Sequence[_HookHere]) -> None:
        """Install the hooks of one module, one callable per type; those of greater depth run closer to the forward."""
        calls: Calls | None = None
        if any(self._follows_calls(hook, path) for _, hook, path in here):
            calls = Calls(self.clock.calls, self.clock.tokens)
        by_kind: dict[type[ModuleHook], list[HookSite]] = {}
        for kind, hook, path in here:
            by_kind.setdefault(kind, []).append(self._site(hook, path, module, calls))
        outermost_first = [
            self._register(kind, by_kind[kind]) for kind in sorted(by_kind, key=attrgetter("depth"))
        ]
        for registered in outermost_first:
            self._handles += registered.before(module)
        for registered in reversed(outermost_first):
            self._handles += registered.after(module)
        if len(outermost_first) == 1 and calls is None:
            call = outermost_first[0].call_directly(module, self._handles[-1].id)
            if call is not None:
                self._direct_calls.append((module, call))

    # ---- parameters --------------------------------------------------------------------------------------------

    def _install_on_parameters(self, modules: Mapping[str, nn.Module]) -> None:
        on_gradients = defaultdict[tuple[str, HookType], list[HookSite]](list)
        on_steps: list[HookSite] = []
        for hook in self.plan.hooks:
            hook_type = hook.spec.hook_type
            kind = registered_hooks()[hook_type]
            if not issubclass(kind, ParameterHook | OptimizerSteps):
                continue
            for match in hook.matches:
                module = modules[_owner(hook_type, match)]
                site = self._site(hook, match.path, module)
                self.hooked.add(match.path, module)
                if issubclass(kind, OptimizerSteps):
                    on_steps.append(site)
                else:
                    on_gradients[match.path, hook_type].append(site)
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
        gradients = self.wrapped = GradientsOfWrapped(self._model, self.hooked, added)
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
        self.observers.clear()
        self.hooked.places.clear()
        self._followed.clear()
        self.clock.passes = None
        forget(self.clock.calls)
        self.clock.calls.begins.clear()
        self.clock.calls.ends.clear()
        self.clock.ending.clear()
        self.clock.in_graphs.clear()  # breaks reference cycles: their functions refer to the clock
        self.closing.close()


def _misplaced(
    hook_type: HookType, match: Match, module: nn.Module | None, added: Collection[tuple[str, str]]
) -> str | None:
    """What the plan has at this place and the model lacks; None: it is there.

    module: what the model has there
    added:  the (module path, name) of each parameter that the hooks add
    """
    if module is None or class_name(module) != match.type:
        present = "nothing" if module is None else f"a {class_name(module)}"
        return f"a {match.type} at {_owner(hook_type, match) or '(root)'}, this model has {present} there"
    if not hook_type.on_parameters:
        return None
    owner, _, name = match.path.rpartition(".")
    is_parameter = module._parameters.get(name) is not None or name in parametrized(module)
    if is_parameter or (owner, name) in added:
        return None
    return f"the parameter {match.path}, which this model does not have"


def _lies_elsewhere(module: nn.Module, kind: HookType) -> bool:
    """Whether a parameter that the hook may change is on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters(recurse=not kind.on_parameters))


_COUNTED = frozenset({FORWARD, FORWARD_PRE, OUTPUT_GRAD})
"""The hook types that do something once in each call, while it is open: this is counted."""


def _numbers_records(hook: PlannedHook) -> bool:
    """Whether the hook records something at a call of a module, whose number the record has."""
    spec = hook.spec
    return spec.hook_type.on == "module" and spec.action.observes and not spec.action.captures


def _note_fired(stack: CallStack, sites: Sequence[HookSite], *call: object) -> None:
    """Note, where a forward begins, how often sites that count their calls have fired."""
    if stack.innermost is not None:
        fired_before = stack.innermost.forward.fired_before
        for site in sites:
            fired_before.setdefault(site, site.fired)


def _needs_calls(hook: PlannedHook) -> bool:
    """Whether the calls are followed: a recomputation is identified by them, values are of the same forward."""
    spec = hook.spec
    draws = spec.draws_in_forward
    if draws and hook.functions and spec.keys.when.probability == 1:
        draws = may_draw(hook.functions.values())
    return draws or spec.action.by_call or spec.keys.tokens is not None or bool(passed_on([hook]))
