"""`target`: which tensor of a value. Parsed, never evaluated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hookrun.errors import shown
from hookrun.values.index import bounded, whole

Key = int | str
MAX_LENGTH = 1_000
"""Characters of a target."""
_STEP = re.compile(
    r"""\[\s*(?P<number>[+-]?\d+)\s*\]
      | \[\s*'(?P<single>[^']*)'\s*\] | \[\s*"(?P<double>[^"]*)"\s*\]
      | \.?(?P<name>[^\W\d]\w*)""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Target:
    """A path into a value: integers subscript, strings name a dict key, an attribute or a keyword argument."""

    text: str
    keys: tuple[Key, ...]

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(parse_target)


def parse_target(raw: Any) -> Target:
    """Parse ``[0].logits``, ``hidden_states[-1]``, ``['a key'][1]``; ValueError says where it cannot be read."""
    if isinstance(raw, Target):
        return raw
    text = f"[{bounded(raw)}]" if isinstance(raw, int) and not isinstance(raw, bool) else raw
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"found {shown(raw)}, expected a path like [0], logits, hidden_states[-1] or ['a key'][1]"
        )
    text, at, keys = text.strip(), 0, list[Key]()
    if len(text) > MAX_LENGTH:
        raise ValueError(f"found a text of {len(text):,} characters, expected at most {MAX_LENGTH:,}")
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None or (at == 0 and text.startswith(".")):
            raise ValueError(
                f"found {text!r}, which cannot be read from {text[at:]!r} on; "
                "expected a path like [0], logits, hidden_states[-1] or ['a key'][1]"
            )
        number, single, double, name = step.group("number", "single", "double", "name")
        if name is not None and at > 0 and not step.group().startswith("."):
            raise ValueError(f"found {text!r}: a dot is missing before {name!r}")
        keys.append(
            whole(number) if number is not None else next(k for k in (single, double, name) if k is not None)
        )
        at = step.end()
    return Target(text, tuple(keys))


def path_text(keys: tuple[Key, ...]) -> str:
    """The text of a path, as `parse_target` reads it."""
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        elif isinstance(key, str) and key.isidentifier():
            text += f".{key}" if text else key
        else:
            text += f"[{key!r}]"
    return text
