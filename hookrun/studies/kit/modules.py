"""The modules that a key of a task selects."""

from __future__ import annotations

from hookrun.engine.plan.model_tree import ModelNames
from hookrun.engine.spec.selector import Selector
from hookrun.errors import CompileError, Problem

SEE_MODULES = "look at the modules with task=modules"


def selected(names: ModelNames, selector: Selector, where: str) -> list[str]:
    """The paths of the modules that the selector at the key path `where` matches. CompileError if there are none."""
    paths = list(dict.fromkeys(names.first_name(path) for path in selector.select(names.tree)))
    if not paths:
        what = f"{str(selector)!r} matches no module; {names.nearest(selector, on_parameters=False)}"
        problem = Problem(where, what, SEE_MODULES)
        raise CompileError([names.unmatched(problem, selector, on_parameters=False)])
    return paths
