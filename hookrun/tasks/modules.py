"""task=modules: the tree of module paths with class, parameters and output shape, and what a selector matches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hookrun.errors import CompileError, Problem, SpecError, nearest
from hookrun.spec import Experiment, parse_spec
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
        from hookrun.tasks.loop.built import build
        from hookrun.tasks.loop.prepared import compiled, compiled_without_data

        every = parse_spec({"every": {"select": "**", "hook": "forward", "action": "capture"}})
        settings = experiment.settings
        try:
            built = build(settings, "train", trust)
        except SpecError as error:
            return compiled_without_data(experiment, every, "train", error, trust)
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
