"""How large the object of `--json` is: long lists, mappings and texts are cut, and `more` counts what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookrun.store.format import encode

MOST_BYTES = 20_000
"""Bytes of an object that is cut: lists and texts are cut more until it fits."""
_ITEMS = 100
_INNER_ITEMS = 20
_CHARACTERS = 2_000
_SHARES = (1, 2, 5, 20)
_WHOLE = frozenset({"text", "schema"})
"""Keys of what was asked for as a whole, which is never cut."""
_FORMS = frozenset({"plan", "answer"})
"""Keys of mappings whose keys are hookrun's; those of others are names of hooks, modules and metrics."""


def written(said: Mapping[str, Any], *, full: bool) -> str:
    """The object as strict ASCII JSON on one line.

    full: nothing is cut
    """
    if full:
        return encode(said)
    text = ""
    for share in _SHARES:
        text = encode(_cut_object(said, share))
        if len(text) < MOST_BYTES:
            break
    return text


def _cut_object(said: Mapping[str, Any], share: int) -> dict[str, Any]:
    cut = dict[str, Any]()
    left = 0
    for key, value in said.items():
        more = 0
        if key not in _WHOLE:
            value, more = _cut(value, _ITEMS // share, share, is_form=key in _FORMS)
        cut[key] = value
        left = max(left, more)
    return {**cut, "more": left} if left else cut


def _cut(value: Any, most: int, share: int, *, is_form: bool) -> tuple[Any, int]:
    """The value with at most `most` items, and how many were left out if it does not say that itself, as `more`.

    is_form: it is a mapping with keys of hookrun's: none is left out
    """
    if isinstance(value, str):
        return _shortened(value, _CHARACTERS // share), 0
    if isinstance(value, Mapping):
        return _cut_mapping(value, most, share, is_form=is_form)
    if not isinstance(value, Sequence):
        return value, 0
    left = max(len(value) - most, 0)
    items = list[Any]()
    for item in value[:most]:
        shown, more = _cut(item, _INNER_ITEMS // share, share, is_form=True)
        items.append(shown)
        left = max(left, more)
    return items, left


def _cut_mapping(
    value: Mapping[str, Any], most: int, share: int, *, is_form: bool
) -> tuple[dict[str, Any], int]:
    cut = dict[str, Any]()
    inner = 0
    for key in list(value)[: None if is_form else most]:
        shown, more = _cut(value[key], _INNER_ITEMS // share, share, is_form=key in _FORMS)
        if key == "fix":  # is applied as it is
            shown = value[key]
        cut[_shortened(key, _CHARACTERS // share)] = shown
        inner = max(inner, more)
    left = max(len(value) - len(cut), inner)
    if is_form and left:
        return {**cut, "more": left}, 0
    return cut, left


def _shortened(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
