"""task=modules: the tree of module paths with class, parameters and output shape, and what a selector matches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hookrun.errors import CompileError, Problem, SpecError, nearest
from hookrun.spec import Experiment, Spec, parse_spec
from hookrun.spec.selector import Selector, parse_selector
from hookrun.tasks.base import Task

if TYPE_CHECKING:
    from torch.nn import Module

    from hookrun.plan.plan import Match
    from hookrun.tasks.loop.prepared import Prepared


class ModulesTask(Task):
    """Shows the tree. The experiment's hooks are not compiled: one looks at the modules to write them.

    select: a selector; the modules that it matches are marked with ``*``
    """

    task_name: ClassVar[str] = "modules"
    shows: ClassVar[bool] = True

    select: Any = None

    def prepare(self, experiment: Experiment, *, trust: frozenset[str]) -> Prepared:
        """Build the model, and prove a hook on every module, from which its output shapes are known."""
        from hookrun.tasks.loop.prepared import build, compiled

        every = parse_spec({"every": {"select": "**", "hook": "forward", "action": "capture"}})
        settings = experiment.settings
        try:
            built = build(settings, "train", trust)
        except SpecError as error:
            if not all(each.where.startswith("data.") for each in error.errors):
                raise
            return _without_data(experiment, every, error, trust)
        return compiled(experiment, every, built, "train", training=True)

    def show(self, prepared: Prepared) -> None:
        """Print the tree.

        Raises SpecError for a selector that makes no sense, CompileError for one that matches nothing.
        """
        from rich.tree import Tree

        from hookrun.tasks.loop.progress import Screen

        screen = Screen()
        matches = {match.path: match for hook in prepared.plan.hooks for match in hook.matches}
        selector = None if self.select is None else _parsed(self.select)
        picked = set[str]() if selector is None else _picked(selector, prepared.model)
        root = Tree(_label(matches[""], picked))
        branches = {"": root}
        for path, match in matches.items():
            if path:
                branches[path] = branches[path.rpartition(".")[0]].add(_label(match, picked))
        screen.console.print(root, soft_wrap=True)
        screen.say(f"{len(matches)} modules, {matches[''].parameters:,} parameters")
        if selector is not None:
            names = ", ".join(sorted(path or "(root)" for path in picked))
            screen.say(f"* {str(selector)!r} matches {len(picked)}: {names}")
        if prepared.plan.unchecked:
            screen.say(f"shapes unknown: {prepared.plan.unchecked}")
        screen.note(prepared.notes)


def _without_data(experiment: Experiment, every: Spec, error: SpecError, trust: frozenset[str]) -> Prepared:
    """The tree of a model that takes nothing from the data, which is not there; shapes stay unknown.

    Raises `error` where the model needs the data.
    """
    from dataclasses import replace

    from hookrun import models
    from hookrun.data import DataInfo, TensorInfo
    from hookrun.proving import compile_plan
    from hookrun.tasks.loop.prepared import Prepared
    from hookrun.tasks.loop.session import device_named, session

    settings = experiment.settings
    try:
        with session(settings.compute, settings.seed):
            model = models.build(settings.model, sample_shape=None, num_classes=None, trust=trust)
    except SpecError:
        raise error from None
    leftover = models.load_weights(model, settings.model)
    why = "; ".join(f"{each.where}: {each.what}" for each in error.errors)
    plan = replace(compile_plan(every, model), unchecked=why)
    nothing = DataInfo(settings.data.name, dict[str, TensorInfo](), None, None, {"train": 0, "val": 0})
    return Prepared(
        experiment=experiment,
        data=nothing,
        model=model,
        device=device_named(settings.compute.device),
        leftover=leftover,
        applied=models.applied_hooks(settings.model),
        plan=plan,
        notes=tuple(experiment.notes),
    )


def _parsed(raw: object) -> Selector:
    try:
        return parse_selector(raw)
    except ValueError as error:
        raise SpecError([Problem("task.select", str(error))]) from error


def _picked(selector: Selector, model: Module) -> set[str]:
    """The modules that match, which stand for their parameters too; else the parameters that do."""
    from hookrun.plan.model_tree import ModelNames

    names = ModelNames(model)
    modules = {names.first_name(path) for path in selector.select(names.tree)}
    picked = modules or set(selector.select(names.parameter_tree()))
    if not picked:
        text = f"{str(selector)!r} matches no module and no parameter"
        raise CompileError(
            [Problem("task.select", text, nearest(str(selector), filter(None, names.modules)))]
        )
    return picked


def _label(match: Match, picked: set[str]) -> str:
    name = match.path.rpartition(".")[2] or "(root)"
    mark = "* " if match.path in picked else ""
    others = [path for path in match.names if path != match.path]
    also = f"  (also {', '.join(others)})" if others else ""
    return f"{mark}{name}  {match.type}  {match.parameters:,}  {match.shape or '-'}{also}"
