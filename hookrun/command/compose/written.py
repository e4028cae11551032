"""Python values as overrides of the command line, where commas, quotes, brackets and spaces have a meaning.

Each text is read again by Hydra's own parser: a value that would come back as another one is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from hookrun.command.compose.hydra import MAX_JOBS
from hookrun.command.compose.overrides import of_one_value
from hookrun.errors import SpecError, shown, spec_error

_SIMPLE = (bool, int, float, str)
_ONE_VALUE = (str, bytes, Mapping, set, frozenset)
"""What Python can iterate over, and is still not a list of values in an order."""


def override(key: str, value: Any) -> str:
    """``key=value``, as it would be typed. Raises SpecError for a value that Hydra cannot read."""
    _check(key)
    return f"{key}={_written(key, value)}"


def sweep_override(key: str, values: Any) -> str:
    """``key=value,value``, one value for each job of a sweep. Raises SpecError."""
    _check(key)
    if not isinstance(values, Iterable) or isinstance(values, _ONE_VALUE):
        hint = f"write {{{key!r}: [{values!r:.40}]}}; what only Hydra reads as several values goes into `overrides`"
        raise spec_error(key, f"found {shown(values)}, expected a list of values", hint)
    several = list(islice(values, MAX_JOBS + 1))
    if not several:
        raise spec_error(key, "the list of values is empty", "give at least one")
    if len(several) > MAX_JOBS:
        raise spec_error(key, f"the sweep has more than {MAX_JOBS:,} jobs", "sweep over fewer values")
    texts = [_written(key, value) for value in several]
    return f"{key}={','.join(texts)}"


def _check(key: Any) -> None:
    """Raise SpecError for what is not the name of a key."""
    if not isinstance(key, str) or not key or not _reads(key, "1", 1):
        raise spec_error(shown(key), "is not the name of a key", "write its path, such as hooks.clip_fc.max")


def _written(key: str, value: Any) -> str:
    """The text for which Hydra reads this value. Raises SpecError where there is none."""
    plain = _plain(key, value)
    if isinstance(plain, str) and plain and "\\" not in plain and _reads(key, plain, plain):
        return plain  # without quotes, as most would type it
    text = _text(plain)
    if not _reads(key, text, plain):
        raise _unwritable(key, value)
    return text


def _unwritable(key: str, value: Any) -> SpecError:
    what = f"found {shown(value)}, which cannot be written as an override"
    return spec_error(key, what, "a value is a number, a text, None, or a list or a mapping of these")


def _plain(key: str, value: Any) -> Any:
    """The value in Python's own types: of a path its text, of a number of NumPy the number."""
    if value is None or type(value) in _SIMPLE:
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(key, member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, member) for member in value]
    item = getattr(value, "item", None)  # of a number of NumPy, or a tensor with one
    try:
        number = item() if callable(item) else None
    except (TypeError, ValueError, RuntimeError):
        number = None
    if type(number) not in _SIMPLE:
        raise _unwritable(key, value)
    return number


def _text(value: Any) -> str:
    """The value in Hydra's grammar, texts in quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        members = [f"{name}: {_text(member)}" for name, member in value.items()]
        return f"{{{', '.join(members)}}}"
    return repr(value)


def _reads(key: str, text: str, value: Any) -> bool:
    """Whether Hydra reads ``key=text`` as this one value of this key."""
    parsed = of_one_value(f"{key}={text}")
    if parsed is None or parsed.get_key_element() != key:
        return False
    return repr(parsed.value()) == repr(value)  # True is not 1, and nan is nan
