"""Validates a plain mapping of hooks and reports all mistakes together, with key paths. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hookrun.engine.keys import MAX_DEPTH, MAX_NAME, MAX_TEXT, ROOT_KEYS
from hookrun.engine.spec.hook import HookSpec, Spec, parse_hooks
from hookrun.engine.spec.selector.base import shown
from hookrun.engine.validation import join, unknown_key
from hookrun.errors import Problem, SpecError, spec_error

__all__ = [
    "HookSpec",
    "Spec",
    "in_file_order",
    "parse_spec",
]


def parse_spec(config: Mapping[str, Any], seed: int = 0) -> Spec:
    """Validate ``{"hooks": {...}}`` or the hooks mapping itself.

    Raises SpecError with every mistake in it, in the order of the file.
    """
    if not isinstance(config, Mapping):
        raise spec_error("hooks", f"found {shown(config)}, expected a mapping from name to hook")
    has_hooks = "hooks" in config and not _is_hook(config["hooks"])
    written = config if has_hooks else {"hooks": config}
    refuse_beyond_limits(config, "" if has_hooks else "hooks")
    whole, problems = without_boolean_keys(written)
    hooks, wrong = parse_hooks(whole["hooks"])
    problems += [unknown_root(key, whole[key]) for key in whole if key not in ROOT_KEYS]
    problems += wrong
    if problems:
        raise SpecError(in_file_order(problems, written))
    return Spec(tuple(hooks), seed=seed)


def _is_hook(body: Any) -> bool:
    """Whether `body` is the body of one hook, which may be called "hooks", and not the mapping of all hooks."""
    return isinstance(body, Mapping) and (isinstance(body.get("action"), str) or callable(body.get("action")))


TYPED_ONLY = {
    "trust": "type it: +trust=[mypkg], or set HOOKRUN_TRUST=mypkg in the environment",
    "resume": "type it: resume=latest, or resume=DIR",
    "resume_anyway": "type it: resume_anyway=true",
    "fail_fast": "type it: fail_fast=true",
}
"""Root keys that a file may not set -> hint for the error message."""


def unknown_root(key: Any, value: Any, deeper: Sequence[str] = ()) -> Problem:
    """An unknown key at the root of a configuration; `deeper`: the key paths in it that end in this key."""
    match key:
        case "experiment":
            return Problem(
                "experiment",
                "unknown key: an experiment file forgot `# @package _global_`",
                "put `# @package _global_` on the first line of the experiment file",
            )
        case "defaults":
            return Problem(
                "defaults", "is Hydra's: only composed files know it", "use load_spec(experiment=NAME)"
            )
        case str() if key in TYPED_ONLY:
            return Problem(key, "is taken from the command line only, never from a file", TYPED_ONLY[key])
    return unknown_key("", key, ROOT_KEYS, deeper, {key: value})


MAX_VALUES = 1_000_000
MAX_INTEGER = 1 << 64


def refuse_beyond_limits(config: Any, where: str = "") -> None:
    """Raise SpecError for the first place where a plain spec is nested too deeply or too large, or a value in it is.

    config: mappings and lists; other objects are not looked into
    """
    pending = [(config, where, 0)]
    count = 0
    while pending:
        value, path, depth = pending.pop()
        count += 1
        if count > MAX_VALUES:
            what = f"the spec holds more than {MAX_VALUES:,} values"
            raise spec_error(path, what, "keep tensors in a file")
        if depth > MAX_DEPTH:
            raise spec_error(path[:MAX_NAME], f"is nested more than {MAX_DEPTH} deep")
        _refuse_large(value, path)
        members: list[tuple[Any, Any]] = []
        if isinstance(value, Mapping):
            members += value.items()
        elif isinstance(value, list | tuple):
            members += enumerate(value)
        for name, _ in members:
            _refuse_large(name, path)
        for name, _ in members:
            if isinstance(name, str) and len(name) > MAX_NAME:
                what = f"found a name of {len(name):,} characters, expected at most {MAX_NAME}"
                raise spec_error(path, what)
        pending += [(inner, join(path, str(name)), depth + 1) for name, inner in reversed(members)]


def _refuse_large(value: Any, path: str) -> None:
    """Raise SpecError for a text or a number that is too large."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise spec_error(path, f"found a text of {len(value):,} characters, expected at most {MAX_TEXT:,}")
    if isinstance(value, int) and not -MAX_INTEGER < value < MAX_INTEGER:
        what = "found a whole number of more than 64 bits"
        raise spec_error(path, what, "write it with an exponent: 1e30")


_ARGUMENTS = ("model.args", "data.args")
"""Keys whose values are arguments of a user's own function, which may have any keys."""


def without_boolean_keys(config: Mapping[Any, Any], where: str = "") -> tuple[dict[Any, Any], list[Problem]]:
    """The mapping without boolean keys, at any depth, and a problem for each; values are shared, not copied."""
    left: dict[Any, Any] = {}
    problems: list[Problem] = []
    for key, value in config.items():
        path = join(where, str(key))
        if isinstance(key, bool):
            problems.append(unknown_key(where, key, ()))
        elif isinstance(value, Mapping) and where not in _ARGUMENTS:
            left[key], inner = without_boolean_keys(value, path)
            problems += inner
        else:
            left[key] = value
    return left, problems


def in_file_order(problems: Iterable[Problem], config: Mapping[Any, Any]) -> list[Problem]:
    """The problems, each once, in the order of the configuration; a missing key comes after those beside it."""
    order = {path: number for number, path in enumerate(_paths(config, ""))}

    def position(problem: Problem) -> int:
        path = problem.where
        if path in order:
            return order[path]
        while path not in order:
            path = path.rpartition(".")[0]
        return order[path + _END]

    return sorted(dict.fromkeys(problems), key=position)


_END = "\n"
"""Marks the end of a section among key paths."""


def _paths(value: Any, path: str) -> Iterator[str]:
    """The key paths of a section in its order, its own first and its end last."""
    yield path
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _paths(inner, join(path, str(key)))
    yield path + _END
