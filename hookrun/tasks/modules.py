"""task=modules: the tree of module paths with class, parameters and output shape, and what a selector matches."""

from __future__ import annotations

from rich.tree import Tree

from hookrun.compiler.names import ModelNames
from hookrun.compiler.plan import Target
from hookrun.errors import CompileError, Problem, SpecError, nearest
from hookrun.spec.selector import Selector, parse_selector
from hookrun.tasks.prepare import Prepared
from hookrun.tasks.progress import Screen


def show_modules(prepared: Prepared, screen: Screen) -> None:
    """Print the tree; modules that `task.select` matches are marked with ``*``.

    Raises SpecError for a selector that makes no sense, CompileError for one that matches nothing.
    """
    targets = {target.path: target for hook in prepared.plan.hooks for target in hook.targets}
    raw = prepared.settings.task.select
    selector = None if raw is None else _parsed(raw)
    picked = set[str]() if selector is None else _picked(selector, prepared)
    root = Tree(_label(targets[""], picked))
    branches = {"": root}
    for path, target in targets.items():
        if path:
            branches[path] = branches[path.rpartition(".")[0]].add(_label(target, picked))
    screen.console.print(root, soft_wrap=True)
    screen.say(f"{len(targets)} modules, {targets[''].parameters:,} parameters")
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


def _label(target: Target, picked: set[str]) -> str:
    name = target.path.rpartition(".")[2] or "(root)"
    mark = "* " if target.path in picked else ""
    others = [path for path in target.names if path != target.path]
    also = f"  (also {', '.join(others)})" if others else ""
    return f"{mark}{name}  {target.type}  {target.parameters:,}  {target.shape or '-'}{also}"
