"""`task.over`: the keys of the hook that change from cell to cell, and the hook with other values of them.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from hookrun.engine.spec import HookSpec
from hookrun.engine.spec.hook import HookKeys
from hookrun.engine.validation import Section, parse
from hookrun.errors import Problem, nearest, shown

WHERE = "task.over"
EACH = "each"
MODULE = "module"
HEADS = "heads"
TOKENS = "tokens"
INDEX = "index"
CALL = "call"
EXPERTS = "experts"
COUNTED = (MODULE, HEADS, TOKENS, INDEX, CALL, EXPERTS)
"""The keys whose values the model or the data can list, for `each` and windows."""

EVERY = "**"
"""The selector of a hook without `select` that is moved over `module: each` or windows of modules."""

_OTHER_KEYS = ("target", "when")

PLACES = (MODULE, HEADS, TOKENS, INDEX, CALL, *_OTHER_KEYS)
"""The keys that say where a hook acts."""

Size = Annotated[int, Field(strict=True, ge=1, le=10**9)]


def listed_if_one(raw: Any) -> Any:
    """A list as it is; any other value as the only one of a list."""
    return raw if isinstance(raw, list | tuple) else (raw,)


Sizes = Annotated[tuple[Size, ...], BeforeValidator(listed_if_one), Field(min_length=1)]


class Window(Section):
    """Every run of neighbouring values.

    window: how many modules, heads, tokens, calls or experts; for `index` the size along each of the last dimensions
    stride: from the start of one window to the next, by default 1
    """

    window: Sizes
    stride: Sizes = (1,)


def _channels(over: dict[str, Any]) -> dict[str, Any]:
    """Whole numbers in a list of `index` are channels, as those of `each`."""
    values = over.get(INDEX)
    if not isinstance(values, tuple):
        return over
    channels = [neighbours(INDEX, value) if isinstance(value, int) else value for value in values]
    return {**over, INDEX: tuple(channels)}


def _values(raw: Any) -> Any:
    """`each`, a list of values, or a window."""
    if raw == EACH or isinstance(raw, Window):
        return raw
    if isinstance(raw, Mapping):
        keys = Window.model_fields
        wrong = [key for key in raw if key not in keys]
        if wrong:
            raise ValueError(f"found the key {shown(wrong[0])}: {nearest(str(wrong[0]), keys)}")
        if "window" not in raw:
            raise ValueError(f"found {shown(raw)}: `window` is missing, as in {{window: 3, stride: 1}}")
        return Window.model_validate(raw)
    if isinstance(raw, list | tuple) and raw:
        return tuple(raw)
    raise ValueError(f"found {shown(raw)}, expected each, a list of values, or {{window: 3}}")


Over = Annotated[
    dict[str, Annotated[Any, BeforeValidator(_values)]], Field(min_length=1), AfterValidator(_channels)
]
"""Key of the hook -> its values; the order of the keys is the order of the axes."""


def problems_of(over: Over, hook: HookSpec) -> Iterator[Problem]:
    """Keys that the hook does not have, and kinds of values that its keys cannot have."""
    of_any = [key for key in COUNTED if key != EXPERTS]
    possible = [*of_any, *_OTHER_KEYS, *type(hook.action).model_fields]
    for key, values in over.items():
        where = f"{WHERE}.{key}"
        if key not in possible:
            yield Problem(
                where,
                f"{hook.action.action_name} on {hook.hook_type} has no such key",
                nearest(key, possible),
            )
        elif key not in COUNTED and not isinstance(values, tuple):
            yield Problem(where, "its values cannot be counted", "list them: [0.5, 1, 2]")
        elif isinstance(values, Window) and key != INDEX and len(values.window) > 1:
            yield Problem(where, "has one dimension", "give one number: {window: 3}")
        elif isinstance(values, Window) and len(values.stride) not in (1, len(values.window)):
            yield Problem(where, "window and stride differ in length", "give one stride for each")
        elif key == CALL and "when" in over:
            yield Problem(
                where, "`when` names calls too", "give the whole schedule in `when`, or leave it out"
            )


def place_of(where: str, hook: str, over: Over) -> str:
    """The key path of a mistake: one in a key of the hook, whose value comes from `over`, is there."""
    for key in over:
        of_hook = f"hooks.{hook}.{_KEYS.get(key, key)}"
        if where == of_hook or where.startswith(f"{of_hook}."):
            return f"{WHERE}.{key}"
    return where


def first_value(key: str, values: Any) -> Any:
    """One value that the key surely takes, before the model is known."""
    if isinstance(values, tuple):
        return list(values) if key == MODULE else values[0]
    if key == INDEX and isinstance(values, Window):
        return index_of((0, size) for size in values.window)
    if key == TOKENS and isinstance(values, Window):
        return neighbours(key, 0, values.window[0])
    return neighbours(key, 0)


def neighbours(key: str, start: int, count: int = 1) -> Any:
    """The value of a counted key for so many neighbours; of `index` one channel.

    A sample that is shorter than the positions is left as it is.
    """
    if key in (HEADS, CALL, EXPERTS):
        return list(range(start, start + count))
    if key == TOKENS:
        return {"position": start if count == 1 else f"{start}:{start + count}", "missing": "skip"}
    return f":, {start}"


def index_of(bounds: Iterable[tuple[int, int]]) -> str:
    """A window over the last dimensions: (start, end) along each."""
    return ", ".join(["...", *(f"{start}:{end}" for start, end in bounds)])


def varied(hook: HookSpec, values: Mapping[str, Any], place: str = "") -> tuple[HookSpec, list[Problem]]:
    """The hook with other values of its keys, and every mistake in them.

    place: where the values are, below the key's own place in `over`
    """
    keys = hook.keys
    action = hook.action
    problems: list[Problem] = []
    for key, value in values.items():
        where = f"{WHERE}.{key}{place}"
        if key in type(action).model_fields:
            given = {name: getattr(action, name) for name in action.model_fields_set}
            changed, wrong = parse(type(action), {**given, key: value}, where)
            action = changed or action
        else:
            name = _KEYS.get(key, key).partition(".")[0]
            given = {"select": keys.select, "hook": keys.hook, name: _completed(keys, key, value)}
            read, wrong = parse(HookKeys, given, where)
            if read is not None:
                keys = keys.model_copy(update={name: getattr(read, name)})
        problems += [replace(each, where=where) for each in wrong]
    return replace(hook, keys=keys, action=action), problems


_KEYS = {MODULE: "select", CALL: "when.call"}
"""The keys of a hook that `over` calls otherwise."""

_PLACES = {"position", "id", "text", "span", "exclude", "query", "key"}


def _completed(keys: HookKeys, key: str, value: Any) -> Any:
    """The value with what the hook itself says about heads (`count`, `dim`), tokens (`phase`, `dim`, …) and `when`."""
    if key == CALL:
        return keys.when.model_dump(exclude={CALL}) | {CALL: value}
    if key == HEADS and keys.heads is not None and not isinstance(value, Mapping):
        return keys.heads.model_dump(mode="json", exclude_unset=True) | {"pick": value}
    if key == TOKENS and keys.tokens is not None:
        clause = keys.tokens.model_dump(mode="json", exclude_unset=True)
        for name in _PLACES:
            clause.pop(name, None)
        return clause | dict(value if isinstance(value, Mapping) else {"position": value})
    return value
