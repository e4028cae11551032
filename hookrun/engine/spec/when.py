"""`when` and `expect`: the schedule on which a hook acts, and how many modules it must match."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    model_validator,
)

from hookrun.engine.actions.fields import Finite, Number
from hookrun.engine.actions.statistics import SIZES, Name
from hookrun.engine.spec.selector import SchemaOnDemand
from hookrun.engine.spec.selector.base import shown
from hookrun.engine.validation import Section
from hookrun.engine.values.index import Written, parsed_as
from hookrun.errors import whole_characters

if TYPE_CHECKING:
    from torch import Tensor

MOST = 10**15
"""The largest count of steps, epochs, calls or modules."""


class Range(Section):
    """`start` included, `end` excluded, `every` counted from `start`."""

    start: int = Field(default=0, ge=0, le=MOST)
    end: int | None = Field(default=None, ge=0, le=MOST)
    every: int = Field(default=1, ge=1, le=MOST)

    @model_validator(mode="after")
    def _not_empty(self) -> Range:
        if self.end is not None and self.end <= self.start:
            raise ValueError(
                f"start {self.start} is not before end {self.end} (end is excluded): it never fires"
            )
        return self

    def __contains__(self, number: int) -> bool:
        before_end = self.end is None or number < self.end
        return number >= self.start and before_end and (number - self.start) % self.every == 0

    def __str__(self) -> str:
        every = f"every {self.every}" if self.every > 1 else ""
        if not self.start and self.end is None:
            return every or "any"
        return f"{self.start}:{'' if self.end is None else self.end} {every}".rstrip()


def _numbers(raw: Any, most: int, expected: str) -> frozenset[int]:
    """The numbers that a single one or a list of them stands for; `expected` says in an error what each one is."""
    numbers = [raw] if isinstance(raw, int) else raw
    if not isinstance(numbers, list | tuple | set | frozenset):
        raise ValueError(f"found {shown(raw)}, expected {expected}, or a list of them")
    if not numbers:
        raise ValueError("the list is empty: it never fires")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= most:
            raise ValueError(f"found {shown(number)}, expected {expected}")
    return frozenset(numbers)


def _counts(raw: Any) -> frozenset[int] | Range:
    match raw:
        case str():
            raise ValueError(f"found {shown(raw)}; a range is written {{start: 0, end: 100, every: 10}}")
        case Mapping() | Range():
            return Range.model_validate(raw)
        case int() | list() | tuple() | frozenset() if not isinstance(raw, bool):
            return _numbers(raw, MOST, f"a count from 0 on, at most {MOST:,}")
    raise ValueError(f"found {shown(raw)}, expected a number, a list of numbers, or start, end, every")


_ONE_OR_SEVERAL = {
    "type": ["integer", "array"],
    "minimum": 0,
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
}
Ranks = Annotated[
    frozenset[int],
    BeforeValidator(lambda raw: _numbers(raw, 10**6, "the number of a process, from 0 on")),
    PlainSerializer(sorted),  # a set is unordered
    WithJsonSchema(_ONE_OR_SEVERAL),
]
Counts = Annotated[
    frozenset[int] | Range,
    BeforeValidator(_counts),
    PlainSerializer(lambda counts: counts.model_dump() if isinstance(counts, Range) else sorted(counts)),
    SchemaOnDemand(lambda: {"anyOf": [_ONE_OR_SEVERAL, Range.model_json_schema()]}),
]


class ValueCondition(Section):
    """A statistic of each sample's value, as the action `stats` has it, above or below a number; NaN is neither."""

    of: Name
    above: Number | None = None
    below: Number | None = None

    @model_validator(mode="after")
    def _can_hold(self) -> ValueCondition:
        if self.of in SIZES:
            raise ValueError(f"of: {self.of} is the same for every sample")
        if self.above is None and self.below is None:
            raise ValueError("give above, below or both")
        above = -math.inf if self.above is None else self.above
        below = math.inf if self.below is None else self.below
        if above >= below:
            raise ValueError(f"nothing is above {above:g} and below {below:g}: it never fires")
        return self

    def holds(self, statistic: Tensor) -> Tensor:
        """Whether the statistic [rows] of each row is as it must be, [rows] bool."""
        above = ~statistic.isnan() if self.above is None else statistic > self.above
        return above if self.below is None else above & (statistic < self.below)

    def __str__(self) -> str:
        text: str = self.of
        if self.above is not None:
            text = f"{self.above:g} < {text}"
        if self.below is not None:
            text = f"{text} < {self.below:g}"
        return text


MOST_FIELDS = 64
"""The largest number of names of fields of samples in a file that are kept."""
MOST_CHARACTERS = 256
"""Characters of a field that is kept: of its name and its value."""

Scalar = StrictBool | StrictInt | Finite | StrictStr
"""A value that a field of a sample may have."""


def typed(value: Scalar) -> tuple[bool, Scalar]:
    """The value in a form in which true is not equal to 1; a number and a text are never equal."""
    return isinstance(value, bool), value


def text_of(value: Scalar) -> str:
    """The value as YAML has it, a text in quotation marks."""
    return whole_characters(json.dumps(value, ensure_ascii=False))


def _in_lists(raw: Any) -> Any:
    if not isinstance(raw, Mapping):
        return raw
    return {name: given if isinstance(given, list | tuple) else [given] for name, given in raw.items()}


Wanted = Annotated[
    dict[str, Annotated[list[Scalar], Field(min_length=1)]],
    BeforeValidator(_in_lists),
    Field(min_length=1),
    WithJsonSchema({"type": "object", "minProperties": 1}),
]
"""Field of the data -> the values of which a sample must have one."""


class When(Section):
    """The schedule; every given key must hold. Steps, epochs and calls count from 0.

    mode:        the model is in training or in evaluation mode
    step, epoch: a number, a list of numbers, or ``{start, end, every}``
    call:        the n-th call of a module that is used several times within one forward
    rank:        on one process of a run, or on those of a list, for hooks that only observe; a single process is rank 0
    probability: of each firing, drawn from a generator of its own (`seed`)
    value:       for the samples whose part of the tensor, as the action sees it, has such a statistic
    data:        for the samples that have these values in fields of the data
    """

    mode: Literal["train", "eval", "any"] = "any"
    step: Counts | None = None
    epoch: Counts | None = None
    call: Counts | None = None
    rank: Ranks | None = None
    probability: float = Field(default=1.0, ge=0, le=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    value: ValueCondition | None = None
    data: Wanted | None = None

    @property
    def always(self) -> bool:
        """Whether it holds at every firing."""
        return self == When(seed=self.seed)

    @property
    def of_samples(self) -> str:
        """The conditions that choose among the samples of a batch, in words; ``""`` if there are none."""
        conditions = [] if self.value is None else [str(self.value)]
        for name, values in (self.data or {}).items():
            conditions.append(f"{name} {' or '.join(map(text_of, values))}")
        return ", ".join(conditions)

    def covers(self, other: When) -> bool:
        """Whether the mode, step and epoch of the other imply those of this one, which has no other conditions."""
        if not self.model_copy(update={"mode": "any", "step": None, "epoch": None, "call": None}).always:
            return False
        if self.mode not in ("any", other.mode):
            return False
        return self.step in (None, other.step) and self.epoch in (None, other.epoch)

    def holds_in(self, training: bool) -> bool:
        """Whether the condition on the mode allows this mode."""
        return self.mode == "any" or (self.mode == "train") == training

    def holds_at(self, step: int, epoch: int) -> bool:
        """Whether the conditions on step and epoch allow this step of this epoch."""
        return (self.step is None or step in self.step) and (self.epoch is None or epoch in self.epoch)

    def beyond(self, calls: int) -> str | None:
        """Which call it names that a module does not have, of which a forward has so many; None: there is none."""
        if self.call is None:
            return None
        numbers = [self.call.start] if isinstance(self.call, Range) else sorted(self.call)
        for number in numbers:
            if number >= calls:
                return f"there is no call {number}, they count from 0"
        return None

    def __str__(self) -> str:
        parts: list[str] = []
        if self.mode != "any":
            parts.append(self.mode)
        for name in ("step", "epoch", "call", "rank"):
            counts = getattr(self, name)
            if isinstance(counts, frozenset):
                counts = ",".join(map(str, sorted(counts)))
            if counts is not None:
                parts.append(f"{name} {counts}")
        if self.probability < 1:
            parts.append(f"p={self.probability:g}")
        if self.of_samples:
            parts.append(self.of_samples)
        return ", ".join(parts) or "always"


@dataclass(frozen=True)
class Expect(Written):
    """How many modules (for parameter hooks: parameters) must match."""

    least: int
    most: int | None

    def __contains__(self, count: int) -> bool:
        return count >= self.least and (self.most is None or count <= self.most)


def parse_expect(raw: Any) -> Expect:
    """Parse ``3``, ``">=1"``, ``"<=4"`` or ``"0..2"``."""
    is_count = isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw <= MOST
    text = str(raw).strip() if is_count or isinstance(raw, str) else ""
    bound = re.fullmatch(r"(>=|<=)?\s*(\d{1,20})", text, re.ASCII)
    if bound is not None:
        number = int(bound[2])
        least = 0 if bound[1] == "<=" else number
        most = None if bound[1] == ">=" else number
        return Expect(text, least, most)
    between = re.fullmatch(r"(\d{1,20})\s*\.\.\s*(\d{1,20})", text, re.ASCII)
    if between is None:
        raise ValueError(f'found {shown(raw)}, expected a count: 3, ">=1", "<=4" or "0..2"')
    least = int(between[1])
    most = int(between[2])
    if least > most:
        raise ValueError(f"found {text!r}: {least} is more than {most}")
    return Expect(text, least, most)


AnyExpect = Annotated[
    Expect,
    parsed_as(Expect, parse_expect),
    WithJsonSchema(
        {"type": ["integer", "string"], "minimum": 0, "pattern": r"^ *(([<>]=)? *\d+|\d+ *\.\. *\d+) *$"}
    ),
]
"""The type of a pydantic field that holds an expected count."""
