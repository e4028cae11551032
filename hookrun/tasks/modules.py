"""task=modules: the tree of module paths with class, parameters and output shape, and what a selector matches."""

from __future__ import annotations

from rich.tree import Tree

from hookrun.errors import CompileError, Problem, SpecError, nearest
from hookrun.plan.model_tree import ModelNames
from hookrun.plan.plan import Match
from hookrun.spec.selector import Selector, parse_selector
from hookrun.tasks.loop.progress import Screen
from hookrun.tasks.prepare import Prepared


def show_modules(prepared: Prepared, screen: Screen) -> None:
    """Print the tree; modules that `task.select` matches are marked with ``*``.

    Raises SpecError for a selector that makes no sense, CompileError for one that matches nothing.
    """
    matches = {match.path: match for hook in prepared.plan.hooks for match in hook.matches}
    raw = prepared.settings.task.select
    selector = None if raw is None else _parsed(raw)
    picked = set[str]() if selector is None else _picked(selector, prepared)
    root = Tree(_label(matches[""], picked))
    branches = {"": root}
    for path, match in matches.items():
        if path:
            branches[path] = branches[path.rpartition(".")[0]].add(_label(match, picked))
    screen.console.print(root, soft_wrap=True)
    screen.say(f"{len(matches)} modules, {matches[''].parameters:,} parameters")
    if selector is not None:
        screen.say(
            f"* {str(selector)!r} matches {len(picked)}: {', '.join(sorted(p or '(root)' for p in picked))}"
        )
    if prepared.plan.unchecked:
        screen.say(f"shapes unknown: {prepared.plan.unchecked}")


def _parsed(raw: object) -> Selector:
    try:
        return parse_selector(raw)
    except ValueError as error:
        raise SpecError([Problem("task.select", str(error))]) from error


def _picked(selector: Selector, prepared: Prepared) -> set[str]:
    """The modules that match, which stand for their parameters too; else the parameters that do."""
    names = ModelNames(prepared.model)
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
