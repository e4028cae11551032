"""task=modules: prints the module tree with classes, parameters and output shapes, and the matches of a selector."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hookrun.data.info import SPLITS
from hookrun.engine.hook_types import FORWARD
from hookrun.engine.spec import Spec, parse_spec
from hookrun.engine.spec.selector import AnySelector, Selector
from hookrun.engine.spec.selector.tree import ancestors
from hookrun.errors import SpecError, compile_error, counted, printable
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.task import JobCache, Task

if TYPE_CHECKING:
    from rich.console import OverflowMethod
    from rich.tree import Tree
    from torch.nn import Module

    from hookrun.engine.plan.plan import Match, PlannedHook
    from hookrun.run.experiment.prepared import Prepared
    from hookrun.run.passes.progress import Screen


MOST_LEVELS = 1_000
_LINES_BELOW = 5
"""The number of terminal lines that are kept free for the output below the tree."""
_UNLIMITED = 100_000
"""The width of a line that is not cut."""
_GUIDE = 4
"""The width of rich's lines before a module, for each level."""
_OUTPUTS: Mapping[str, str] = {"every": FORWARD.name}


class ModulesTask(Task):
    """Shows the module tree. The experiment's hooks are not compiled, since this task helps to write them.

    select: a selector; the modules that it matches are marked with ``*``
    depth:  the number of levels below the root; null: as many as fit into the terminal, or all without a terminal
    full:   show all levels and complete lines, whatever the size of the terminal
    """

    task_name: ClassVar[str] = "modules"
    shows: ClassVar[bool] = True
    in_python: ClassVar[str] = "hookrun.modules(model) gives them"

    select: AnySelector | None = None
    depth: int | None = Field(default=None, ge=1, le=MOST_LEVELS)
    full: bool = False

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Prepared:
        """Build the model, and run it once with a hook on every module to find the output shapes."""
        from hookrun.run.experiment.prepare import prepare_alone, without_data

        errors: list[SpecError] = []
        for split in SPLITS:  # data may have one split only
            try:
                return prepare_alone(experiment, on_every_module, split, trust)
            except SpecError as error:
                errors.append(error)
        return without_data(experiment, on_every_module, SPLITS[0], errors[0], trust)

    def show(self, prepared: Prepared) -> None:
        """Print the tree.

        Raises CompileError for a selector without matches.
        """
        from hookrun.run.passes.progress import Screen

        screen = Screen()
        matches = modules_of(prepared.model, prepared.plan.hooks)
        picked = [] if self.select is None else picked_by(self.select, prepared.model, "task.select")
        depth = self.depth
        if depth is None and not self.full and screen.height is not None:
            depth = _fitting_depth(matches, screen.height - _LINES_BELOW)
        shown = {path for path in matches if depth is None or _level(path) <= depth}
        for path in picked:
            shown.update(matches.keys() & {path, *ancestors(path)})
        self._print_tree(screen, matches, shown, frozenset(picked))
        screen.say(f"{counted(len(matches), 'module')}, {counted(matches[''].parameters, 'parameter')}")
        if picked:
            screen.say(
                f"* {str(self.select)!r} matches {len(picked)}: {', '.join(path or '(root)' for path in picked)}"
            )
        if hidden := len(matches) - len(shown):
            screen.say(
                f"{counted(hidden, 'module')} further down: task.depth={(depth or 0) + 1} shows one more level, "
                "task.full=true everything"
            )
        if prepared.plan.unchecked:
            screen.say(f"shapes unknown: {prepared.plan.unchecked}")
        screen.note(prepared.notes)

    def as_data(self, prepared: Prepared) -> dict[str, Any]:
        """The modules, and those that `select` matches. Raises CompileError for a selector without matches."""
        rows: list[dict[str, Any]] = []
        for match in modules_of(prepared.model, prepared.plan.hooks).values():
            row = {key: getattr(match, key) for key in ("path", "type", "parameters", "shape")}
            rows.append({**row, "names": match.names} if len(match.names) > 1 else row)
        if self.select is None:
            return {"modules": rows}
        return {"modules": rows, "selected": picked_by(self.select, prepared.model, "task.select")}

    def _print_tree(
        self, screen: Screen, matches: Mapping[str, Match], shown: Set[str], picked: Set[str]
    ) -> None:
        console = screen.console
        is_utf = console.encoding.startswith("utf")  # an encoding without lines has no ellipsis either
        tree = tree_of(matches, shown, picked, "ellipsis" if is_utf else "crop")
        width = console.width
        limit = None if self.full else screen.width
        console.width = limit or _UNLIMITED
        console.print(tree, soft_wrap=False)
        console.width = width


def on_every_module(model: Module, hook_types: Mapping[str, str] = _OUTPUTS) -> Spec:
    """Hooks of these names and types on each module around which one can fire."""
    from hookrun.engine.plan.model_tree import ModelNames

    inside = [*ModelNames(model).inside()]
    select = {"type": "*", "exclude": inside} if inside else "type:*"
    hooks: dict[str, dict[str, Any]] = {}
    for name, hook_type in hook_types.items():
        hooks[name] = {"select": select, "hook": hook_type, "action": "print"}
    return parse_spec(hooks)


def modules_of(model: Module, hooks: Iterable[PlannedHook]) -> dict[str, Match]:
    """Path -> the module there, in the model's order; those of the hooks with what they have found out."""
    from hookrun.engine.plan.model_tree import ModelNames

    names = ModelNames(model)
    every = names.inside()
    for hook in hooks:
        every |= {match.path: match for match in hook.matches}
    return {path: every[path] for path in names.modules if path in every}


def tree_of(
    matches: Mapping[str, Match], shown: Set[str], picked: Set[str], overflow: OverflowMethod
) -> Tree:
    """The modules in the model's order, each with class, parameters, output shape and further names.

    shown:  the paths of the modules that the tree has
    picked: paths that are marked with ``*``
    overflow: how a line that is longer than the terminal ends
    """
    from rich.text import Text
    from rich.tree import Tree

    listed = [matches[path] for path in matches if path in shown]
    names: list[str] = []
    indents: list[int] = []
    for match in listed:
        name = match.path.rpartition(".")[2] or "(root)"
        names.append(f"* {name}" if match.path in picked else name)
        indents.append(_GUIDE * _level(match.path))
    name_width = max(indent + len(name) for indent, name in zip(indents, names, strict=True))
    class_width = max(len(match.type) for match in listed)
    size_width = max(len(f"{match.parameters:,}") for match in listed)
    below = Counter[str]()
    for path in matches:
        below.update(ancestors(path))
    unfolded = set[str]()
    for path in shown:
        unfolded.update(ancestors(path))
    nodes: dict[str, Tree] = {}
    for match, name, indent in zip(listed, names, indents, strict=True):
        columns = [
            name.ljust(name_width - indent),
            match.type.ljust(class_width),
            f"{match.parameters:,}".rjust(size_width),
            match.shape or "-",
        ]
        if others := [path for path in match.names if path != match.path]:
            columns.append(f"(also {', '.join(others)})")
        if below[match.path] and match.path not in unfolded:
            columns.append(f"(+{below[match.path]} below)")
        label = Text(printable("  ".join(columns)), no_wrap=True, overflow=overflow)
        parent = nodes.get(match.path.rpartition(".")[0]) if match.path else None
        nodes[match.path] = Tree(label) if parent is None else parent.add(label)
    return nodes[""]


def _level(path: str) -> int:
    """The depth of a module path; 0 for the root."""
    return path.count(".") + 1 if path else 0


def _fitting_depth(paths: Iterable[str], lines: int) -> int:
    """The deepest level down to which all modules fit into `lines` lines; at least 1."""
    levels = sorted(map(_level, paths))
    depth = levels[-1]
    while depth > 1 and bisect_right(levels, depth) > lines:
        depth -= 1
    return max(depth, 1)


def picked_by(selector: Selector, model: Module, where: str) -> list[str]:
    """The paths of the modules that match; if none does, the names of the parameters that match."""
    from hookrun.engine.plan.model_tree import ModelNames

    names = ModelNames(model)
    modules = [names.first_name(path) for path in selector.select(names.tree)]
    picked = modules or selector.select(replace(names.parameter_tree(), modules=None))
    if not picked:
        raise compile_error(
            where,
            f"{str(selector)!r} matches no module and no parameter",
            names.nearest(selector, on_parameters=False),
        )
    return list(dict.fromkeys(picked))
