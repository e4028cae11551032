"""Resolves interpolations safely: few resolvers, no environment values, and limits on their number and size.

The text alone does not tell what `${oc.${x}:SECRET}` refers to, nor how large `${a}${a}` becomes, so both are checked
here, while OmegaConf resolves them. How many a file may have is limited before it is parsed
(`hookrun.store.config.yaml_files`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf, base
from omegaconf.errors import InterpolationResolutionError

from hookrun.engine.values.private_names import require

require("omegaconf")

RESOLVERS = frozenset(
    {
        "hydra",
        "now",
        "oc.create",
        "oc.decode",
        "oc.deprecated",
        "oc.dict.keys",
        "oc.dict.values",
        "oc.select",
    }
)
"""The resolvers that a configuration may use. Resolvers of an application could run any code."""
MAX_RESOLVED = 1_000
"""Interpolations resolved for one configuration."""
MAX_VALUES = 10_000
"""Values that the interpolations of a configuration stand for."""
MAX_CHARACTERS = 1 << 20
"""Characters of its texts, likewise."""
MAX_NESTED = 32
"""Interpolations that lead to one another."""


class RefusedInterpolation(InterpolationResolutionError):
    """An interpolation is not allowed in a configuration, or is too large."""


@dataclass
class _Budget:
    resolved: int = 0
    nested: int = 0
    values: int = 0
    characters: int = 0
    last: Any = None  # what a name stood for when it was weighed last

    def weigh(self, value: Any) -> None:
        """Count what an interpolation stands for. Raises RefusedInterpolation."""
        value = value._value() if isinstance(value, Node) and not isinstance(value, Container) else value
        if isinstance(value, str):
            self.characters += len(value)
        pending = [value]
        while pending and self.values <= MAX_VALUES:
            self.values += 1
            node = pending.pop()
            content = node._content if isinstance(node, DictConfig | ListConfig) else ()
            pending += content.values() if isinstance(content, dict) else list(content or ())
        if self.values > MAX_VALUES or self.characters > MAX_CHARACTERS:
            raise RefusedInterpolation("the interpolations of the configuration stand for too many values")


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)
_resolve, _find = Container.resolve_parse_tree, Container._resolve_node_interpolation
_evaluate = Container._evaluate_custom_resolver
_parse = base.parse  # type: ignore[attr-defined]
_parse_once = lru_cache(maxsize=256)(_parse)
_MOST_CACHED = 1_000
"""Characters of a text whose syntax tree is kept: OmegaConf parses a text each time that it is named."""


def literal(text: str) -> str:
    """The text, such as a path, as a value of a configuration that resolves to it."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


@contextmanager
def guarded() -> Iterator[None]:
    """A context in which interpolations of this thread are resolved with the restrictions of this module.

    Other threads are not affected. A nested block shares the limits of the outer one.
    """
    if _budget.get() is not None:
        yield
        return
    # They stay there, and outside a guarded block do what OmegaConf's own do.
    Container.resolve_parse_tree = _counted  # type: ignore[method-assign]
    Container._resolve_node_interpolation = _weighed  # type: ignore[method-assign]
    Container._evaluate_custom_resolver = _allowed  # type: ignore[assignment, method-assign]
    base.parse = _parsed  # type: ignore[assignment, attr-defined]
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def resolved(config: Any) -> Any:
    """A DictConfig or ListConfig as plain data, with all interpolations resolved and no value missing.

    Raises RefusedInterpolation early for interpolations that are too large.
    """
    with unguarded(), guarded():
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


@contextmanager
def unguarded() -> Iterator[None]:
    """A context without the restrictions, for code that the user trusts, such as their own model."""
    token = _budget.set(None)
    try:
        yield
    finally:
        _budget.reset(token)


def _parsed(text: str, *rules: str, **named: str) -> Any:
    """`omegaconf.base.parse`: the syntax tree of a text, which nobody changes."""
    return (_parse_once if len(text) <= _MOST_CACHED else _parse)(text, *rules, **named)


def _allowed(self: Container, **options: Any) -> Any:
    """`Container._evaluate_custom_resolver`, which in a guarded block knows the allowed resolvers only."""
    name = options["inter_type"]
    if name in RESOLVERS or _budget.get() is None:
        value = _evaluate(self, **options)
        if value is None and name == "hydra" and _budget.get() is not None:
            raise RefusedInterpolation(
                "Hydra has no value at the place that `${hydra:…}` names; write the value"
            )
        return value
    if name == "oc.env":
        raise RefusedInterpolation(
            "no value of the environment enters a configuration, so that none is written to disk: `oc.env` is refused; "
            "write the value, or let the shell fill it in on the command line: key=$NAME"
        )
    raise RefusedInterpolation(
        f"the resolver {name[:100]!r} is not available in a configuration; write the value itself"
    )


def _counted(self: Container, *args: Any, **kwargs: Any) -> Any:
    """`Container.resolve_parse_tree`, which OmegaConf calls for each interpolation, with limits."""
    budget = _budget.get()
    if budget is None:
        return _resolve(self, *args, **kwargs)
    budget.resolved += 1
    if budget.resolved > MAX_RESOLVED:
        raise RefusedInterpolation(f"the configuration resolves more than {MAX_RESOLVED:,} interpolations")
    if budget.nested >= MAX_NESTED:
        raise RefusedInterpolation(f"more than {MAX_NESTED} interpolations lead to one another")
    budget.nested += 1
    try:
        value = _resolve(self, *args, **kwargs)
    finally:
        budget.nested -= 1
    if value is None or value is not budget.last:
        budget.weigh(value)
    return value


def _weighed(self: Container, *args: Any, **kwargs: Any) -> Any:
    """`Container._resolve_node_interpolation`, for each name in a text: its value counts before texts are joined."""
    value = _find(self, *args, **kwargs)
    if (budget := _budget.get()) is not None:
        budget.weigh(value)
        budget.last = value
    return value
