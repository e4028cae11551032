"""Registers a plan's hooks on a model, through `Module.apply`, and removes them again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookrun.actions.user_code import may_draw
from hookrun.errors import CompileError, HookrunError, Problem
from hookrun.hook_types import HookType
from hookrun.plan.model_tree import unhookable
from hookrun.plan.plan import Match, PlannedHook, ResolvedPlan
from hookrun.runtime.apply_action import Op, compose, unscaled
from hookrun.runtime.checkpointing import repeating
from hookrun.runtime.clock import Calls, Clock, frames_of, gate
from hookrun.runtime.compiled import Tracing, tracing
from hookrun.runtime.fast.direct_calls import call_directly
from hookrun.runtime.hooked_parameters import HookedParameters
from hookrun.runtime.hooks import registered_hooks
from hookrun.runtime.hooks.base import BoundHook, ModuleHook, ParameterHook, RegisteredHook, Shared
from hookrun.runtime.hooks.installation import AtInstallation
from hookrun.runtime.hooks.optimizer_step import OptimizerSteps
from hookrun.runtime.optimizers import follow, unfollow
from hookrun.runtime.reduced import GradientsOfWrapped, ReducedGradients, in_group
from hookrun.runtime.sharded import is_sharded, move_inside_sharding, sharded_too_early
from hookrun.runtime.site import HookSite, Sink
from hookrun.runtime.tokens.sequences import Sequences

R = TypeVar("R", bound=RegisteredHook)


class Wiring:
    """The registered hooks of one plan on one model.

    sites:     one for each hook and module or parameter, in the order of installation
    tracing:   what the sites do inside compiled graphs
    sequences: which tokens the calls of the model compute; None where no hook has `tokens`, or before installation

    restored: the identities of the hooks that had changed the model when its present state was saved
    reduced:  runs the hooks on parameter gradients after they were summed over several ranks; None: torch runs them
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        model: nn.Module,
        clock: Clock,
        sink: Sink,
        restored: Collection[str] = (),
        reduced: ReducedGradients | None = None,
    ) -> None:
        self.plan = plan
        self.clock = clock
        self.sink = sink
        self.sites = list[HookSite]()
        self.tracing = Tracing(plan)
        self.sequences: Sequences | None = None
        self._model = model
        self._restored = restored
        self._reduced = reduced
        self._shared = Shared(model, clock)
        self._handles = list[RemovableHandle]()
        self._registered = list[RegisteredHook]()
        self._hooked = HookedParameters(model)

    def install(self) -> None:
        """Register all hooks. Raises CompileError, before the first one, if the plan was made for another model."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        self._require_same_model(modules)
        self.clock.on_change = self.tracing.reschedule
        self._run_at_installation(modules)
        self._follow_tokens()
        self._count_forwards()
        self._install_on_modules(modules)
        self._install_on_parameters(modules)
        self._forget_tokens()
        move_inside_sharding(self._model, {handle.id for handle in self._handles})

    def _require_same_model(self, modules: Mapping[str, nn.Module]) -> None:
        """Raise CompileError if the plan was made for another model, or if the model has been compiled since."""
        if (reason := unhookable(self._model)) is not None:
            raise CompileError([Problem("model", reason.what, reason.hint)])
        there = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        there.update(f"{owner}.{name}" if owner else name for owner, name in self.plan.added())
        problems = []
        for hook, match in self._planned():
            owner = _owner(hook, match)
            module = modules.get(owner)
            if module is None or type(module).__name__ != match.type:
                found = "nothing" if module is None else f"a {type(module).__name__}"
                text = f"the plan is for a {match.type} at {owner or '(root)'}, this model has {found} there"
                problems.append(Problem(hook.spec.where, text, "compile the spec against this model"))
            elif hook.spec.on_parameters and match.path not in there:
                text = f"the plan is for the parameter {match.path}, which this model does not have"
                problems.append(Problem(hook.spec.where, text, "compile the spec against this model"))
        problems += sharded_too_early(self.plan, self._model)
        if problems:
            raise CompileError(problems)

    def _planned(self, *kinds: type[RegisteredHook]) -> Iterable[tuple[PlannedHook, Match]]:
        """Each hook with each of its matches; only hooks that are registered as one of `kinds`, if any are given."""
        for hook in self.plan.hooks:
            if not kinds or issubclass(registered_hooks()[hook.spec.hook_type], kinds):
                yield from ((hook, match) for match in hook.matches)

    # ---- sites and firings -------------------------------------------------------------------------------------

    def _site(self, hook: PlannedHook, path: str, module: nn.Module) -> HookSite:
        site = HookSite(hook, path, module, self.clock, self.sink, self.plan.seed)
        self.sites.append(site)
        return site

    def _firing(self, site: HookSite) -> BoundHook:
        targeted = not registered_hooks()[site.hook_type].finds_target
        open_gate = gate(site.spec.keys.when, self.clock, lambda: site.call, site.chance)

        def finished(op: Op) -> Op:
            if site.hook_type.phase == "backward":
                op = unscaled(op, self.clock)
            op = self.sink.guard(site, op)
            if self._reduced is not None and self._reduced.stands_in and site.hook_type.of_rows:
                op = partial(_of_own_rows, op, self.clock, site)
            return op if open_gate is None else partial(_scheduled, op, open_gate)

        composed = compose(site, targeted=targeted)
        op_of_new = None if composed.of_new is None else finished(composed.of_new)
        traced = self.tracing.of(site, targeted=targeted)
        return BoundHook(site, finished(composed.op), traced, op_of_new)

    def _made(self, kind: type[R], sites: Sequence[HookSite]) -> R:
        made = kind.of([self._firing(site) for site in sites], self._shared)
        self._registered.append(made)
        return made

    # ---- modules -----------------------------------------------------------------------------------------------

    def _run_at_installation(self, modules: Mapping[str, nn.Module]) -> None:
        for hook in self.plan.hooks:
            if hook.spec.hook_type.phase == "installation":
                paths = {id(modules[match.path]): match.path for match in hook.matches}
                site_for = partial(self._site, hook)
                restored = hook.spec.identity in self._restored
                AtInstallation.run(self._model, paths, site_for, restored=restored)

    def _install_on_modules(self, modules: Mapping[str, nn.Module]) -> None:
        by_module = defaultdict[int, list[tuple[PlannedHook, Match]]](list)
        for hook, match in self._planned(ModuleHook):
            by_module[id(modules[match.path])].append((hook, match))

        def visit(module: nn.Module) -> None:
            # apply visits a shared module once for each parent
            if planned := by_module.pop(id(module), None):
                self._install_on(module, planned)

        self._model.apply(visit)

    def _install_on(self, module: nn.Module, planned: Iterable[tuple[PlannedHook, Match]]) -> None:
        """Install the hooks of one module, one callable per type; those of greater depth run closer to the forward."""
        by_kind = defaultdict[type[ModuleHook], list[HookSite]](list)
        planned = list(planned)
        calls = self._calls(module, [hook for hook, _ in planned])
        for hook, match in planned:
            site = self._site(hook, match.path, module)
            site.number_calls(calls)
            by_kind[cast(type[ModuleHook], registered_hooks()[site.hook_type])].append(site)
        made = [self._made(kind, by_kind[kind]) for kind in sorted(by_kind, key=lambda kind: kind.depth)]
        for registered in made:
            self._handles += registered.before(module)
        for registered in reversed(made):
            handles = list(registered.after(module))
            self._handles += handles
        direct = made[0].direct(module) if len(made) == 1 and calls is None else None
        if direct is not None and (undo := call_directly(module, handles[0].id, direct)) is not None:
            self._shared.closing.callback(undo)

    @property
    def _tracks_calls(self) -> bool:
        scheduled = any(hook.spec.keys.when.call is not None for hook in self.plan.hooks)
        return scheduled or self.sink.wants_calls

    def _count_forwards(self) -> None:
        if self._tracks_calls and any(self._planned(ModuleHook)):
            counter = ForwardCounter(self.clock)
            self._registered.append(counter)
            self._handles.append(self._model.register_forward_pre_hook(counter.count, prepend=True))

    def _follow_tokens(self) -> None:
        if any(hook.spec.keys.tokens is not None for hook in self.plan.hooks):
            self.sequences = self.clock.passes = Sequences(self._model)
            for registered, handle in self.sequences.register():
                self._registered.append(registered)
                self._handles.append(handle)

    def _forget_tokens(self) -> None:
        if self.sequences is not None:
            registered, handle = self.sequences.register_end()
            self._registered.append(registered)
            self._handles.append(handle)

    def _calls(self, module: nn.Module, hooks: Iterable[PlannedHook]) -> Calls | None:
        if not (self._tracks_calls or any(map(_needs_calls, hooks))):
            return None
        calls = Calls(self.clock)
        counter = CallCounter(calls)
        self._registered.append(counter)
        self._handles.append(module.register_forward_pre_hook(counter.count))
        return calls

    # ---- parameters --------------------------------------------------------------------------------------------

    def _install_on_parameters(self, modules: Mapping[str, nn.Module]) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        on_gradients = defaultdict[tuple[str, HookType], list[HookSite]](list)
        on_steps = list[HookSite]()
        for hook, match in self._planned(ParameterHook, OptimizerSteps):
            site = self._site(hook, match.path, modules[_owner(hook, match)])
            if hook.spec.hook_type.on == "optimizer":
                on_steps.append(site)
            else:
                on_gradients[match.path, hook.spec.hook_type].append(site)
        hooked = {site.path: site.module for sites in on_gradients.values() for site in sites}
        hooked |= {site.path: site.module for site in on_steps}
        for path, module in hooked.items():
            self._hooked.add(path, module, parameters[path])
        gradients = self._gradients_of_ranks() if self._reduced is None else None
        if self._reduced is not None:
            self._hooked.on_move(self._reduced.move)
        if hooked:
            follow(self._hooked)
            self._shared.closing.callback(unfollow, self._hooked)
        for (path, hook_type), sites in on_gradients.items():
            if not parameters[path].requires_grad:
                raise HookrunError(f"{sites[0].where}: the parameter does not require a gradient")
            registered = self._made(cast(type[ParameterHook], registered_hooks()[hook_type]), sites)
            if self._reduced is None:
                if not is_sharded(parameters[path]):  # torch never calls tensor hooks of a sharded parameter
                    self._handles.append(registered.register(parameters[path]))
                if gradients is not None:
                    gradients.add(parameters[path], registered)
            else:
                self._reduced.add(parameters[path], registered)
        if on_steps:
            steps = self._made(OptimizerSteps, on_steps)
            self._hooked.on_move(steps.move)
            follow(steps)
            self._shared.closing.callback(unfollow, steps)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block none of these hooks runs in a forward pass; hooks registered by others still do.

        Changes by `apply` hooks stay in the model.
        """
        ours = {handle.id for handle in self._handles}
        kept = list[tuple[dict[int, Any], dict[int, Any]]]()
        for module in self._model.modules():
            for registered in (module._forward_pre_hooks, module._forward_hooks):
                if not ours.isdisjoint(registered):
                    kept.append((registered, dict(registered)))
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

    def _gradients_of_ranks(self) -> GradientsOfWrapped | None:
        """For a user's own loop that may wrap the model in DDP or fully_shard; None without a process group."""
        added = self.plan.added()
        if not in_group() or not (self._hooked or added):
            return None
        gradients = GradientsOfWrapped(self._model, self._hooked, added)
        self._registered.append(gradients)
        self._handles.append(self._model.register_forward_pre_hook(gradients.forward_pre, prepend=True))
        self._handles.append(self._model.register_forward_hook(gradients.forward))
        return gradients

    def follow_parameters(self) -> None:
        """Move hooks to the shards that fully_shard has put in the place of the parameters."""
        self._hooked.follow()

    def remove(self) -> None:
        """Remove every hook of this installation, and nothing else. Changes by `apply` hooks stay in the model."""
        while self._handles:
            self._handles.pop().remove()
        for registered in self._registered:
            registered.clear()
        self._registered.clear()
        self._hooked.clear()
        self.sequences = self.clock.passes = None
        self.clock.on_change = None  # breaks a reference cycle: clock -> tracing -> sites -> clock, model
        self._shared.closing.close()


def _needs_calls(hook: PlannedHook) -> bool:
    """Whether the calls must be numbered, so that a recomputation under activation checkpointing can be identified."""
    spec = hook.spec
    draws = spec.draws_in_forward
    if draws and hook.functions and spec.keys.when.probability == 1:
        draws = may_draw(hook.functions.values())
    return draws or spec.keys.tokens is not None


def _owner(hook: PlannedHook, match: Match) -> str:
    """The path of the hooked module, or of the module that owns the hooked parameter."""
    return match.path.rpartition(".")[0] if hook.spec.on_parameters else match.path


def _of_own_rows(op: Op, clock: Clock, site: HookSite, value: Any) -> Any:
    """Run the op; in a pass that this rank makes for other ranks only, run it only if it edits in the forward pass.

    The gradients of such a pass are all zero, so observers and edits of gradients are left out.
    """
    idle = clock.stands_in and (site.spec.action.observes or site.hook_type.phase == "backward")
    return value if idle else op(value)


def _scheduled(op: Op, is_open: Callable[[], bool], value: Any) -> Any:
    return op(value) if is_open() else value


class ForwardCounter(RegisteredHook):
    """Counts the forwards of the root module, so that module calls can be numbered within each."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self.clock = clock

    def count(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook on the root module; if that calls itself, only the outermost call is counted."""
        if self.clock is None or tracing() or repeating() is not None:
            return
        if sum(1 for _ in islice(frames_of(module), 2)) == 1:
            self.clock.forward.number += 1


class CallCounter(RegisteredHook):
    """Numbers the calls of a module."""

    def __init__(self, calls: Calls | None = None) -> None:
        super().__init__()
        self.calls = calls

    def count(self, module: nn.Module, args: Any) -> None:
        """torch's forward pre-hook."""
        if self.calls is not None and not tracing():
            self.calls.count(module)
