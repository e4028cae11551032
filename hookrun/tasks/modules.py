"""task=modules: prints the module tree with classes, parameters and output shapes, and the matches of a selector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hookrun.errors import CompileError, Problem, SpecError, counted, nearest
from hookrun.spec import Experiment, parse_spec
from hookrun.spec.selector import Selector, parse_selector
from hookrun.tasks.base import JobCache, Task

if TYPE_CHECKING:
    from torch.nn import Module

    from hookrun.tasks.loop.prepared import Prepared


MOST_LEVELS = 1_000
_LINES_BELOW = 5
"""The number of terminal lines that are kept free for the output below the tree."""


class ModulesTask(Task):
    """Shows the module tree. The experiment's hooks are not compiled, since this task helps to write them.

    select: a selector; the modules that it matches are marked with ``*``
    depth:  the number of levels below the root; null: as many as fit into the terminal, or all without a terminal
    full:   show all levels and complete lines, whatever the size of the terminal
    """

    task_name: ClassVar[str] = "modules"
    shows: ClassVar[bool] = True

    select: Any = None
    depth: int | None = Field(default=None, ge=1, le=MOST_LEVELS)
    full: bool = False

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Prepared:
        """Build the model, and run it once with a hook on every module to find the output shapes."""
        from hookrun.run_values import with_found_weights
        from hookrun.tasks.loop.prepared import prepare_alone, without_data

        every = parse_spec({"every": {"select": "**", "hook": "forward", "action": "capture"}})
        try:
            return prepare_alone(experiment, every, "train", trust)
        except SpecError as error:
            return without_data(with_found_weights(experiment), every, "train", error, trust)

    def show(self, prepared: Prepared) -> None:
        """Print the tree.

        Raises SpecError for an invalid selector, CompileError for a selector without matches.
        """
        from hookrun.tasks.loop.module_rows import fitting_depth, module_rows
        from hookrun.tasks.loop.progress import Screen

        screen = Screen()
        matches = {match.path: match for hook in prepared.plan.hooks for match in hook.matches}
        selector = None if self.select is None else _parsed(self.select)
        picked = set[str]() if selector is None else _picked(selector, prepared.model)
        listed = list(matches.values())
        depth, width = self.depth, None if self.full else screen.width
        if depth is None and not self.full and screen.height is not None:
            depth = fitting_depth(listed, screen.height - _LINES_BELOW)
        rows = module_rows(listed, picked, depth=depth, width=width, plain=not screen.draws_lines)
        for row in rows.lines:
            screen.say(row)
        screen.say(f"{counted(len(matches), 'module')}, {counted(matches[''].parameters, 'parameter')}")
        if selector is not None:
            names = ", ".join(path or "(root)" for path in _in_order(picked, matches))
            screen.say(f"* {str(selector)!r} matches {len(picked)}: {names}")
        if rows.hidden:
            more = f"task.depth={(depth or 0) + 1} shows one more level, task.full=true everything"
            screen.say(f"{counted(rows.hidden, 'module')} further down: {more}")
        if prepared.plan.unchecked:
            screen.say(f"shapes unknown: {prepared.plan.unchecked}")
        screen.note(prepared.notes)


def _parsed(raw: object) -> Selector:
    try:
        return parse_selector(raw)
    except ValueError as error:
        raise SpecError([Problem("task.select", str(error))]) from error


def _picked(selector: Selector, model: Module) -> set[str]:
    """The paths of the modules that match; if none does, the names of the parameters that match."""
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


def _in_order(picked: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Modules in the model's order, then parameters by name, with numbers in numerical order."""
    place = {path: number for number, path in enumerate(modules)}

    def rank(path: str) -> tuple[int, list[tuple[bool, int, str]]]:
        parts = [
            (not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in path.split(".")
        ]
        return place.get(path, len(place)), parts

    return sorted(picked, key=rank)
