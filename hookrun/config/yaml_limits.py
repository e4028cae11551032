"""Limits on YAML files. The text is read event by event, so that nothing is built from a file that is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import yaml

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
"""The largest number of keys and values with aliases expanded, since OmegaConf copies what an alias refers to."""
MAX_DEPTH = 64
MAX_TEXT = 1 << 16
MAX_NAME = 256
MAX_DIGITS = 64
INTERPOLATION_COST = 10
"""How many values an interpolation counts, since OmegaConf parses interpolations slowly."""
MAX_INTERPOLATED = 2_000
"""Characters of a text with interpolations."""
MAX_NESTED = 8
"""Interpolations inside one another, in one text."""

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where PyYAML was built with it."""
_NUMBER = re.compile(r"[-+]?\.?[0-9]")
_BASE_60 = re.compile(r"[-+]?([1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)")
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class OutOfBounds(ValueError):
    """A file exceeds the limits, or has a value that YAML would read as a different one.

    line: of the file, from 1; None for the file as a whole
    """

    def __init__(self, what: str, hint: str = "", line: int | None = None) -> None:
        super().__init__(what)
        self.what, self.hint, self.line = what, hint, line


def check_text(text: str) -> None:
    """Raise OutOfBounds for YAML beyond the limits; errors of YAML that cannot be parsed are left to its reader.

    Uses libyaml if PyYAML was built with it. What libyaml refuses is read again by the parser that OmegaConf uses,
    since the two differ in details.
    """
    try:
        _Count(text, FAST_LOADER).run()
    except yaml.YAMLError:
        if FAST_LOADER is not yaml.SafeLoader:
            _check_slowly(text)


def _check_slowly(text: str) -> None:
    try:
        _Count(text, yaml.SafeLoader).run()
    except yaml.YAMLError:
        return  # reading the file later reports where it is broken


@dataclass(slots=True)
class _Collection:
    """A mapping or a list that is being read.

    values: in it so far, itself included; height: of what is in it so far
    """

    anchor: str | None
    is_mapping: bool
    values: int = 1
    height: int = 1
    children: int = 0


@dataclass
class _Count:
    """One pass over the events of a text."""

    text: str
    loader: type
    open: list[_Collection] = field(default_factory=list)
    anchors: dict[str, tuple[int, int] | None] = field(default_factory=dict)

    def run(self) -> None:
        for event in yaml.parse(self.text, Loader=self.loader):
            match event:
                case yaml.ScalarEvent():
                    cost = self._scalar(event)
                    if event.anchor is not None:
                        self.anchors[event.anchor] = (cost, 0)
                    self._add(event, cost, 0)
                case yaml.AliasEvent():
                    self._alias(event)
                case yaml.CollectionStartEvent():
                    if event.anchor is not None:
                        self.anchors[event.anchor] = None
                    self.open.append(_Collection(event.anchor, isinstance(event, yaml.MappingStartEvent)))
                    self._check(event, sum(each.values for each in self.open), len(self.open))
                case yaml.CollectionEndEvent():
                    done = self.open.pop()
                    if done.anchor is not None:
                        self.anchors[done.anchor] = (done.values, done.height)
                    self._add(event, done.values, done.height)

    def _alias(self, event: yaml.AliasEvent) -> None:
        known = self.anchors.get(str(event.anchor), (1, 0))
        if known is None:
            raise OutOfBounds(f"*{event.anchor} stands for a value that contains itself", line=_line(event))
        self._add(event, *known)

    def _add(self, event: yaml.Event, values: int, height: int) -> None:
        """Add the count and depth of a value to the collection that contains it."""
        if not self.open:
            return
        inner = self.open[-1]
        inner.values += values
        inner.height = max(inner.height, height + 1)
        inner.children += 1
        self._check(event, sum(each.values for each in self.open), len(self.open) + height)

    def _check(self, event: yaml.Event, values: int, depth: int) -> None:
        if values > MAX_VALUES:
            what = f"holds more than {MAX_VALUES:,} values, aliases written out and each interpolation counted as "
            hint = "keep tensors in a file of their own: {file: x.safetensors}"
            raise OutOfBounds(f"{what}{INTERPOLATION_COST}", hint, _line(event))
        if depth > MAX_DEPTH:
            raise OutOfBounds(f"nests its values more than {MAX_DEPTH} deep", line=_line(event))

    def _scalar(self, event: yaml.ScalarEvent) -> int:
        """How many values the text counts. Raises OutOfBounds."""
        text: str = event.value
        is_name = bool(self.open) and self.open[-1].is_mapping and self.open[-1].children % 2 == 0
        if is_name and len(text) > MAX_NAME:
            raise OutOfBounds(
                f"found a name of {len(text):,} characters, expected at most {MAX_NAME}", line=_line(event)
            )
        if len(text) > MAX_TEXT:
            raise OutOfBounds(
                f"found a text of {len(text):,} characters, expected at most {MAX_TEXT:,}", line=_line(event)
            )
        if event.tag in _NUMBER_TAGS or (event.tag is None and event.implicit[0] and _NUMBER.match(text)):
            _check_number(text, _line(event))
        if "${" not in text:
            return 1
        if len(text) > MAX_INTERPOLATED:
            what = f"found a text with interpolations of {len(text):,} characters, expected at most "
            raise OutOfBounds(f"{what}{MAX_INTERPOLATED:,}", line=_line(event))
        if _nested(text) > MAX_NESTED:
            raise OutOfBounds(
                f"found more than {MAX_NESTED} interpolations in one another", line=_line(event)
            )
        return 1 + INTERPOLATION_COST * text.count("${")


def _check_number(text: str, line: int) -> None:
    if _BASE_60.fullmatch(text):
        what = f"found {text[:MAX_DIGITS]}, which YAML 1.1 reads as a number in base 60"
        raise OutOfBounds(what, f"quote it: '{text[:MAX_DIGITS]}'", line)
    if len(text) > MAX_DIGITS and re.fullmatch(r"[-+.\w]+", text):
        what = f"found a number of {len(text):,} characters, expected at most {MAX_DIGITS}"
        raise OutOfBounds(what, "quote it if it is a text", line)


def _nested(text: str) -> int:
    """The largest nesting depth of interpolations in the text."""
    deepest = depth = 0
    for found in re.finditer(r"\$\{|\}", text):
        depth = depth + 1 if found.group() == "${" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return 1 if mark is None else mark.line + 1
