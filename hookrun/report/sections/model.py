"""The model as a tree of its modules; hooked modules are marked with how often the hooks fired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from hookrun.report.facts import RunData, on_parameters

SHORT = 40
"""Modules of a model whose tree is shown whole at first; of a larger one the branches with hooked modules are open."""

MOST = 4000
DEEPEST = 40
"""Levels of the tree; modules further down are shown on the last one."""


def build(facts: RunData) -> dict[str, Any] | None:
    """The tree, and the number of modules and parameters; None if the run has no file of the model.

    folds:    branches can be folded
    left_out: number of modules that are not in the tree, because there are too many

    Of each module in the tree:
    others: other paths of the same module
    shape:  shape of its output; None if no hook needed it
    marks:  its hooks, as `_marks` describes them
    opened: its children are shown at first
    """
    modules = {module.path: module for module in facts.model.modules}
    if "" not in modules:
        return None
    marks = _marks(facts, modules)
    shapes: dict[str, str | None] = {}
    for hook in facts.planned.values():
        if not on_parameters(hook.hook):
            shapes |= {match.path: match.shape for match in hook.targets}
    loud = {""}
    for path in marks:
        loud.update(_above(path), [path])
    is_large = len(modules) > SHORT
    # hooked ones and their parents first
    chosen = set(sorted(modules, key=lambda path: (path != "", path not in loud))[:MOST])
    nodes: dict[str, dict[str, Any]] = {}
    for path, module in modules.items():
        if path in chosen:
            nodes[path] = {
                "name": path.rpartition(".")[2],
                "others": [name for name in module.names if name != path],
                "type": module.type,
                "parameters": module.parameters,
                "shape": shapes.get(path),
                "marks": marks.get(path, []),
                "opened": not is_large or path in loud,
                "children": [],
            }
    for path, node in nodes.items():
        if path:
            # the nearest one that is shown, not below the level `DEEPEST`
            shown = [above for above in _above(path)[: DEEPEST + 1] if above in nodes]
            nodes[shown[-1]]["children"].append(node)
    return {
        "root": nodes[""],
        "modules": len(modules),
        "parameters": modules[""].parameters,
        "folds": is_large,
        "left_out": len(modules) - len(nodes),
    }


def _above(path: str) -> list[str]:
    """The modules that hold the module, the root first."""
    return ["", *accumulate(path.split(".")[:-1], "{}.{}".format)]


def _marks(facts: RunData, modules: Mapping[str, object]) -> dict[str, list[dict[str, Any]]]:
    """Module -> marks of its hooks; hooks on a parameter are shown at the module that owns it.

    counts: (parameter or "", how often the hook fired there; None if the run kept no counts)
    silent: why it did nothing at the module, or at one of its parameters
    """
    marks = defaultdict[str, list[dict[str, Any]]](list)
    for name, hook in facts.planned.items():
        of_hook: dict[str, dict[str, Any]] = {}
        for match in hook.targets:
            owner = match.path
            parameter = ""
            if on_parameters(hook.hook):
                owner, _, parameter = owner.rpartition(".")
            mark = of_hook.setdefault(owner, {"hook": name, "counts": [], "silent": None})
            site = facts.sites.get((name, match.path))
            mark["counts"].append((parameter, None if site is None else site.fired))
            if site is not None and site.silent:
                mark["silent"] = site.silent
        for owner, mark in of_hook.items():
            if owner in modules:
                marks[owner].append(mark)
    return marks
