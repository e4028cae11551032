"""The model as a tree: a line for each module, marked where hooks are, with how often they fired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hookrun.hook_types import HOOK_TYPES
from hookrun.report.facts import Facts

SHORT = 60
"""A larger model shows the modules that have to do with hooks first, the others when asked for."""

MOST = 4000
DEEPEST = 40

ON_PARAMETERS = {name for name, kind in HOOK_TYPES.items() if kind.on_parameters}


@dataclass(frozen=True)
class Count:
    """How often a hook fired at a module, or at a parameter of it; None where nobody has counted."""

    parameter: str
    fired: int | None


@dataclass(frozen=True)
class Mark:
    """A hook at a module; `silent` says why it did nothing there, or at one of its parameters."""

    hook: str
    counts: tuple[Count, ...]
    silent: str | None


@dataclass(frozen=True)
class Line:
    """A module in the tree.

    guide: the branches before its name
    quiet: neither it nor what it holds is hooked
    """

    path: str
    guide: str
    others: tuple[str, ...]
    type: str
    parameters: int
    shape: str | None
    marks: tuple[Mark, ...]
    quiet: bool

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Tree:
    """The lines of a model.

    folds: quiet modules are shown when asked for
    left_out: modules that are not here, because there are too many
    """

    lines: tuple[Line, ...]
    modules: int
    parameters: int
    folds: bool
    left_out: int


def model_tree(facts: Facts) -> Tree | None:
    """The tree of the model that the run wrote down; None where it wrote none."""
    modules = {module["path"]: module for module in facts.model.get("modules", [])}
    if "" not in modules:
        return None
    marks = _marks(facts, modules)
    shapes = {
        target["path"]: target["shape"]
        for hook in facts.planned.values()
        if hook["hook"] not in ON_PARAMETERS
        for target in hook["targets"]
    }
    loud = {""}
    for path in marks:
        while path:
            loud.add(path)
            path = path.rpartition(".")[0]
    guides = dict(_guides(list(modules)))
    lines = [
        Line(
            path=path,
            guide=guides[path],
            others=tuple(name for name in module["names"] if name != path),
            type=module["class"],
            parameters=module["parameters"],
            shape=shapes.get(path),
            marks=tuple(marks.get(path, ())),
            quiet=path not in loud,
        )
        for path, module in modules.items()
    ]
    folds = len(lines) > SHORT and any(line.quiet for line in lines) and any(line.marks for line in lines)
    kept = lines
    if len(lines) > MOST:
        hooked = [line for line in lines if not line.quiet][:MOST]
        room = MOST - len(hooked)
        quiet = {line.path for line in [line for line in lines if line.quiet][:room]}
        chosen = quiet | {line.path for line in hooked}
        kept = [line for line in lines if line.path in chosen]
    shown = tuple(line if folds else replace(line, quiet=False) for line in kept)
    return Tree(shown, len(lines), modules[""]["parameters"], folds, len(lines) - len(kept))


def _marks(facts: Facts, modules: Mapping[str, object]) -> dict[str, list[Mark]]:
    """Module -> its hooks; a parameter's stand with the module that owns it."""
    found = defaultdict[str, list[Mark]](list)
    for name, hook in facts.planned.items():
        counts, silent = defaultdict[str, list[Count]](list), dict[str, str]()
        for target in hook["targets"]:
            path, parameter = target["path"], ""
            if hook["hook"] in ON_PARAMETERS:
                path, _, parameter = path.rpartition(".")
            site = facts.sites.get((name, target["path"]), {})
            counts[path].append(Count(parameter, site.get("fired")))
            if site.get("silent"):
                silent[path] = site["silent"]
        for path, each in counts.items():
            if path in modules:
                found[path].append(Mark(name, tuple(each), silent.get(path)))
    return found


def _guides(paths: list[str]) -> Iterator[tuple[str, str]]:
    """The branches before each module, as trees are drawn in text."""
    children = defaultdict[str, list[str]](list)
    for path in paths:
        if path:
            children[path.rpartition(".")[0]].append(path)
    last = {below[-1] for below in children.values()}
    stems = {"": ""}
    for path in paths:
        if not path:
            yield path, ""
            continue
        stem = stems.get(path.rpartition(".")[0], "")
        yield path, stem + ("└─ " if path in last else "├─ ")
        stems[path] = (stem + ("   " if path in last else "│  "))[-3 * DEEPEST :]
