"""How large the object of `--json` is: long lists, mappings and texts are cut, and `more` counts what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookrun.store.format import encode

MOST_BYTES = 20_000
"""Bytes of an object that is cut: the more it exceeds them, the more its lists and texts are cut."""
_SHARES = (1, 2, 5, 20)
"""The numbers below are divided by the first of these for which it fits."""
_ITEMS = 100
"""Of the lists and mappings of the object itself."""
_INNER_ITEMS = 20
_CHARACTERS = 2_000

_FORMS = frozenset({"plan", "answer"})
"""Keys of mappings whose keys are hookrun's; the keys of other mappings are names of hooks, modules and metrics."""


def written(said: Mapping[str, Any], *, full: bool) -> str:
    """The object as strict ASCII JSON on one line. Its `text` is what was asked for, and is never cut.

    full: nothing is cut
    """
    if full:
        return encode(said)
    line = ""
    for share in _SHARES:
        cut, _ = _cut(said, share, inner=_ITEMS)
        if "text" in said:
            cut["text"] = said["text"]
        line = encode(cut)
        if len(line) < MOST_BYTES:
            break
    return line


def _cut(
    value: Any, share: int, *, most: int = _INNER_ITEMS, inner: int = _INNER_ITEMS, is_form: bool = True
) -> tuple[Any, int]:
    """The value, and how many items were left out of it unless it says that itself, as `more`.

    most:    items of a list or a mapping
    inner:   those of the ones in it
    is_form: a mapping keeps all of its keys, and says itself how many items were left out in it
    """
    if isinstance(value, str):
        return _shortened(value, share), 0
    if isinstance(value, Mapping):
        names = list(value) if is_form else list(value)[: most // share]
        cut: dict[str, Any] = {}
        left = 0
        for name in names:
            shown, more = _cut(value[name], share, most=inner, is_form=name in _FORMS)
            cut[_shortened(name, share)] = shown
            left = max(left, more)
        left = max(left, len(value) - len(cut))
        return ({**cut, "more": left}, 0) if is_form and left else (cut, left)
    if isinstance(value, Sequence):
        items = [_cut(item, share) for item in value[: most // share]]
        left = max([len(value) - len(items), *(more for _, more in items)])
        return [item for item, _ in items], left
    return value, 0


def _shortened(text: str, share: int) -> str:
    half = _CHARACTERS // share // 2
    return text if len(text) <= 2 * half else f"{text[:half]}…{text[-half:]}"
