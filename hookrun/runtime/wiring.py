"""Registers a plan's hooks on a model, through `Module.apply`, and takes them off again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from hookrun.actions.base import IN_FORWARD
from hookrun.errors import CompileError, HookrunError, Problem
from hookrun.plan.model_tree import deaf
from hookrun.plan.plan import Match, Plan, PlannedHook
from hookrun.runtime.apply_action import Op, compose
from hookrun.runtime.clock import Calls, Clock, gate
from hookrun.runtime.compiled import Tracing
from hookrun.runtime.hooks.backward import Backward
from hookrun.runtime.hooks.module_hooks import (
    AccumulatedGrad,
    CallCounter,
    Firing,
    Forward,
    ForwardCounter,
    ForwardOne,
    ForwardPre,
    ForwardWithArguments,
    OutputGrad,
    ParameterGrad,
    RegisteredHook,
    unscaled,
)
from hookrun.runtime.hooks.optimizer_step import OptimizerSteps
from hookrun.runtime.hooks.saved_tensors import SavedTensors, Scopes
from hookrun.runtime.records import Probe
from hookrun.runtime.site import Sink, Site
from hookrun.spec.hook import HookSpec

P = TypeVar("P", bound=RegisteredHook)


class Wiring:
    """The registered hooks of one plan on one model.

    sites:   one for each hook and module or parameter, in the order of installation
    tracing: what they do inside compiled graphs
    """

    def __init__(self, plan: Plan, model: nn.Module, clock: Clock, sink: Sink) -> None:
        self.plan = plan
        self.clock = clock
        self.sink = sink
        self.sites = list[Site]()
        self._model = model
        self._handles = list[RemovableHandle]()
        self._points = list[RegisteredHook]()
        self._scopes: Scopes | None = None
        self.tracing = Tracing(plan)

    def install(self) -> None:
        """Register everything. Raises CompileError, before it registers anything, where the model is not the plan's."""
        by_id = self._planned_by_identity()
        seen = set[int]()
        self.clock.moved = self.tracing.reschedule

        def visit(module: nn.Module) -> None:
            if id(module) in by_id and id(module) not in seen:  # apply visits a shared module once per parent
                seen.add(id(module))
                self._install_on(module, by_id[id(module)])

        for hook in self.plan.hooks:
            if hook.spec.hook_type == "apply":
                self._run_on_modules(hook)
        self._count_forwards()
        self._model.apply(visit)
        self._install_on_parameters()

    def _planned_by_identity(self) -> Mapping[int, list[tuple[PlannedHook, Match]]]:
        """What is planned for each module; CompileError where the model is not the plan's."""
        if (reason := deaf(self._model)) is not None:  # since the plan was made
            raise CompileError([Problem("model", reason.what, reason.hint)])
        modules = dict(self._model.named_modules(remove_duplicate=False))
        planned = defaultdict[int, list[tuple[PlannedHook, Match]]](list)
        there = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        there.update(f"{owner}.{name}" if owner else name for owner, name in self.plan.added())
        problems = []
        for hook in self.plan.hooks:
            for match in hook.matches:
                owner = match.path.rpartition(".")[0] if hook.spec.on_parameters else match.path
                module = modules.get(owner)
                if module is None or type(module).__name__ != match.type:
                    found = "nothing" if module is None else f"a {type(module).__name__}"
                    text = (
                        f"the plan is for a {match.type} at {owner or '(root)'}, this model has {found} there"
                    )
                    problems.append(Problem(hook.spec.where, text, "compile the spec against this model"))
                elif hook.spec.on_parameters and match.path not in there:
                    text = f"the plan is for the parameter {match.path}, which this model has not"
                    problems.append(Problem(hook.spec.where, text, "compile the spec against this model"))
                elif not hook.spec.on_parameters and hook.spec.hook_type != "apply":
                    planned[id(module)].append((hook, match))
        if problems:
            raise CompileError(problems)
        return planned

    def _run_on_modules(self, hook: PlannedHook) -> None:
        """An `apply` hook: its action sees each module once, and what it does to it lasts."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        paths = {id(modules[match.path]): match.path for match in hook.matches}

        def visit(module: nn.Module) -> None:
            path = paths.pop(id(module), None)
            if path is not None:
                site = self._site(hook, path, module)
                hook.spec.action.build(site)(module)
                site.fired += 1

        self._model.apply(visit)

    def _site(self, hook: PlannedHook, path: str, module: nn.Module) -> Site:
        site = Site(hook, path, module, self.clock, self.sink, self.plan.seed)
        self.sites.append(site)
        return site

    def _firing(self, site: Site, *, targeted: bool = True, gradient: bool = False) -> Firing:
        op = compose(site, targeted=targeted)
        if gradient:
            op = unscaled(op, self.clock)
        if isinstance(self.sink, Probe):
            op = self.sink.guard(site, op)
        when = site.spec.keys.when
        open_gate = gate(when, self.clock, lambda: site.call, site.chance)
        if open_gate is not None:
            op = partial(_scheduled, op, open_gate)
        return Firing(site, op, self.tracing.of(site, targeted=targeted))

    def _install_on(self, module: nn.Module, planned: Iterable[tuple[PlannedHook, Match]]) -> None:
        """Every hook of one module, one callable for each type.

        The order is the order of registration: edits first, then what watches gradients, on the final output.
        """
        sites = defaultdict[str, list[Site]](list)
        planned = list(planned)
        calls = self._calls(module, [hook.spec for hook, _ in planned])
        for hook, match in planned:
            site = self._site(hook, match.path, module)
            site.calls = calls
            sites[site.hook_type].append(site)
        if found := sites["forward_pre"]:
            self._pre(module, self._point(ForwardPre(list(map(self._firing, found)))).forward_pre)
        backward = None
        if found := sites["backward_pre"] + sites["backward"]:
            backward = self._point(Backward([self._firing(site, gradient=True) for site in found]))
            self._pre(module, backward.enter)
        if found := sites["saved_tensors"]:
            self._scopes = self._scopes or Scopes(self._model)
            saved = self._point(SavedTensors(tuple(map(self._firing, found)), self._scopes))
            self._handles.append(module.register_forward_pre_hook(saved.enter))
            self._handles.append(module.register_forward_hook(saved.leave, always_call=True))
        if found := sites["forward"]:
            reads = any(site.spec.action.reads_arguments for site in found)
            point = ForwardWithArguments if reads else ForwardOne if len(found) == 1 else Forward
            forward = point(list(map(self._firing, found)))
            self._handles.append(
                module.register_forward_hook(self._point(forward).forward, with_kwargs=reads)
            )
        if backward is not None:
            self._handles.append(module.register_forward_hook(backward.leave, always_call=True))
        if found := sites["output_grad"]:
            firings = [self._firing(site, targeted=False, gradient=True) for site in found]
            self._handles.append(
                module.register_forward_hook(self._point(OutputGrad(firings)).attach, with_kwargs=True)
            )

    def _point(self, point: P) -> P:
        self._points.append(point)
        return point

    def _pre(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    @property
    def _tracks_calls(self) -> bool:
        scheduled = any(hook.spec.keys.when.call is not None for hook in self.plan.hooks)
        return scheduled or self.sink.wants_calls

    def _count_forwards(self) -> None:
        if self._tracks_calls:
            counter = self._point(ForwardCounter(self.clock))
            self._handles.append(self._model.register_forward_pre_hook(counter.count, prepend=True))

    def _calls(self, module: nn.Module, specs: Iterable[HookSpec]) -> Calls | None:
        if not (self._tracks_calls or any(map(_draws_in_forward, specs))):
            return None
        calls = Calls(self.clock)
        self._handles.append(module.register_forward_pre_hook(self._point(CallCounter(calls)).count))
        return calls

    def _install_on_parameters(self) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        modules = dict(self._model.named_modules(remove_duplicate=False))
        grads = defaultdict[tuple[str, str], list[Site]](list)
        steps = list[tuple[Firing, nn.Parameter]]()
        for hook in self.plan.hooks:
            if not hook.spec.on_parameters:
                continue
            for match in hook.matches:
                site = self._site(hook, match.path, modules[match.path.rpartition(".")[0]])
                if hook.spec.hook_type in ("grad", "post_accumulate_grad"):
                    grads[match.path, hook.spec.hook_type].append(site)
                else:
                    steps.append((self._firing(site), parameters[match.path]))
        for (path, kind), sites in grads.items():
            self._install_on_gradient(parameters[path], kind, sites)
        if steps:
            point = self._point(OptimizerSteps(*zip(*steps, strict=True)))
            self._handles.append(register_optimizer_step_pre_hook(point.pre))
            self._handles.append(register_optimizer_step_post_hook(point.post))

    def _install_on_gradient(self, parameter: nn.Parameter, kind: str, sites: Iterable[Site]) -> None:
        firings = [self._firing(site, gradient=True) for site in sites]
        if not parameter.requires_grad:
            raise HookrunError(f"{firings[0].site.where}: the parameter requires no gradient")
        if kind == "grad":
            self._handles.append(parameter.register_hook(self._point(ParameterGrad(firings)).grad))
        else:
            accumulated = self._point(AccumulatedGrad(firings, self.clock)).accumulated
            self._handles.append(parameter.register_post_accumulate_grad_hook(accumulated))

    def remove(self) -> None:
        """Remove every hook of this installation, and nothing else. What `apply` hooks did to the model stays."""
        while self._handles:
            self._handles.pop().remove()
        for point in self._points:
            point.clear()
        self._points.clear()
        self.clock.moved = None  # whose sites hold the clock: a cycle, with the model in it
        if self._scopes is not None:
            self._scopes.close_all()


def _draws_in_forward(spec: HookSpec) -> bool:
    """Whether what it draws has to be found again where activation checkpointing repeats a call."""
    draws = spec.action.draws or any(value.draws for value in spec.action.outside_values().values())
    return spec.hook_type in IN_FORWARD and (draws or spec.keys.when.probability < 1)


def _scheduled(op: Op, is_open: Callable[[], bool], value: Any) -> Any:
    return op(value) if is_open() else value
