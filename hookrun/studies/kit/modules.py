"""The modules that a key of a task selects."""

from __future__ import annotations

from hookrun.engine.plan.model_tree import ModelNames
from hookrun.engine.spec.selector import Selector
from hookrun.errors import compile_error

SEE_MODULES = "look at the modules with task=modules"


def selected(names: ModelNames, selector: Selector, where: str) -> list[str]:
    """The paths of the modules that the selector at the key path `where` matches. CompileError if there are none."""
    paths = list(dict.fromkeys(names.first_name(path) for path in selector.select(names.tree)))
    if not paths:
        raise compile_error(
            where,
            f"{str(selector)!r} matches no module; {names.nearest(selector, on_parameters=False)}",
            SEE_MODULES,
        )
    return paths
