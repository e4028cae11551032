"""The action `check`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, model_validator
from pydantic import Tag as Kind

from hookrun.engine.actions.base import Action, Edit, Halves, HookSite, Reading
from hookrun.engine.actions.fields import Count, Finite, Number, OneOf, Policy, check_order
from hookrun.engine.actions.lanes import EXTREMES, TensorsOfLanes, needs_of
from hookrun.engine.actions.rules import Rules
from hookrun.engine.actions.statistics import (
    INTEGER,
    Name,
    Options,
    Statistic,
    columns_of,
    count_along,
    extremes_in_graph,
    kind_of,
    require_dim,
    require_dtype,
    rows_of,
    statistic,
)
from hookrun.engine.hook_types import FORWARD, OPTIMIZER_STEP_POST, HookType
from hookrun.engine.values.tensors import elements, is_integer, nearest_finite, widened
from hookrun.errors import listed

if TYPE_CHECKING:
    from torch import Tensor, dtype

_SHOWN = 4
"""How many samples a message names."""

LOSS = "loss"
UPDATE_RATIO = "update_ratio"

Checked = Annotated[
    Annotated[Literal[Name, "update_ratio", "loss"], Kind("a name")] | Annotated[Options, Kind("a mapping")],
    Discriminator(kind_of),
]
"""A statistic of `stats`, or one that only hooks of one type have."""

_ON = {UPDATE_RATIO: OPTIMIZER_STEP_POST, LOSS: FORWARD}

_RULES = ("min", "max", "min_change", "max_ratio", "max_zscore")

_GOES_WITH = {
    "dim": "of",
    "share": "dim",
    "over": "of",
    "min_change": "over",
    "max_ratio": "over",
    "max_zscore": "over",
}
"""Key -> the key without which it has no meaning."""

_EXAMPLES = {"of": "of: norm", "dim": "dim: 1", "over": "over: {steps: 50}"}


class Over(OneOf):
    """`over: {steps: 50}`: the length of the window."""

    steps: Count


class Check(Action):
    """Check that every element is finite and min <= x <= max, and report the module where it is not.

    finite: refuse NaN and infinities
    min:    the smallest allowed value
    max:    the largest allowed value
    policy: `error` raises at the module; `stop` finishes the step, saves and ends the run; `warn` only records
    of:     check this statistic instead of each element: one of `stats` that is a number, `{entropy: {of:
            probabilities}}`; `update_ratio` on optimizer_step_post, norm(new - old) / norm(old) of a parameter; `loss`
            of the step on forward
    dim:    check the statistic of each index of this dimension, such as a channel; these are told by number
    share:  report a failure only where at least this share of the indices of `dim` fail
    over:   `{steps: n}`: check the last n steps in which the hook fired
    min_change: over n steps (largest - smallest) / |mean| has to be at least this
    max_ratio:  |number| / |mean of the n steps before| may be at most this
    max_zscore: (number - mean) / standard deviation (divided by n - 1), of the n steps before, may be at most this

    NaN fails `min` and `max` even if `finite` is false. Of complex tensors the absolute value is checked. float8
    is compared in float32. An empty tensor passes.

    With `of` a number that is NaN or infinite fails at once, and is left out of windows. With `over`, `min` and `max`
    fail if all n steps are beyond them. A step's number is the mean of its micro-batches; each rank has the numbers of
    its own rows, but the loss of all. Training, evaluation and each call of a module within a forward have windows of
    their own. Nothing fails before there are n steps. 0 / 0 is 0, and any other number divided by 0 is infinite. A
    failure is reported at the end of the step in which it begins, and again when another index fails too.
    `update_ratio` holds a copy of the parameters during the step; it is 0 where all elements were 0 before. In your own
    loop set `hooks.loss = loss` before each step ends; the callbacks of Lightning and transformers do so.
    """

    action_name = "check"
    observes = True
    finite: bool = Field(default=True, strict=True)
    min: Number | None = None
    max: Number | None = None
    policy: Policy = "error"
    of: Checked | None = None
    dim: Annotated[int, Field(strict=True)] | None = None
    share: Annotated[Finite, Field(gt=0, le=1)] | None = None
    over: Over | None = None
    min_change: Annotated[Finite, Field(gt=0)] | None = None
    max_ratio: Annotated[Finite, Field(gt=0)] | None = None
    max_zscore: Annotated[Finite, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _requires_something(self) -> Check:
        for key, needed in _GOES_WITH.items():
            if getattr(self, key) is not None and getattr(self, needed) is None:
                raise ValueError(f"`{key}` goes with `{needed}`: add `{_EXAMPLES[needed]}`, or another one")
        if self.of is not None:
            self._require_number(statistic(self.of))
        elif not self.finite and self.min is None and self.max is None:
            raise ValueError("nothing is left to check: give min, max or `finite: true`")
        check_order(self.min, self.max)
        return self

    def _require_number(self, of: Statistic) -> None:
        """ValueError for a statistic that is not a number, and for keys that have no meaning beside it."""
        if not of.is_number:
            raise ValueError(
                f"of: {of.key} is a list of numbers: check one number, such as mean, std, norm or zeros"
            )
        if "finite" in self.model_fields_set:
            raise ValueError(
                "`finite` is about elements: leave it out; a statistic that is not finite never passes"
            )
        if not self.bounds:
            rules = _RULES[:2] if self.over is None else _RULES
            raise ValueError(f"nothing is left to check: give {' or '.join(rules)}")
        if self.of == LOSS and (self.over is None or self.dim is not None):
            raise ValueError(
                "the loss is one number of each step: add `over: {steps: 50}`, and leave `dim` out"
            )
        if self.over is not None and self.over.steps == 1 and (self.min_change or self.max_zscore):
            raise ValueError("min_change and max_zscore need more than one step: set over.steps to 2 or more")

    @property
    def bounds(self) -> dict[str, float]:
        """Name of each rule of a statistic -> its bound."""
        bounds = {rule: getattr(self, rule) for rule in _RULES}
        return {rule: bound for rule, bound in bounds.items() if bound is not None}

    @property
    def of_all_rows(self) -> bool:
        """All elements pass if those of each rank do; a statistic is that of the rank's own rows."""
        return self.of is None

    @property
    def reports_loss(self) -> bool:
        """Whether it checks the loss."""
        return self.of == LOSS

    @property
    def by_call(self) -> bool:
        """Whether there is a window for each call within a forward."""
        return self.over is not None

    def note_on(self, shape: str, module: str) -> str:
        """Which dimension has the units where neither form nor module shows it: [N, C, L] and [N, T, C] look alike."""
        if self.dim is None or shape.count(",") != 2 or self.dim % 3 != 1:
            return ""
        return (
            f"units: dimension 1 of {shape} is taken, since {module} does not show which one it is "
            "(`dim` names another)"
        )

    def carried_by(self, hook_type: HookType) -> str | None:
        """`update_ratio` and `loss` are known to hooks of one type."""
        wanted = _ON.get(self.of, hook_type) if isinstance(self.of, str) else hook_type
        if wanted is hook_type:
            return super().carried_by(hook_type)
        return f"`of: {self.of}` goes with {wanted} only"

    def takes_tensor(self, x: Tensor, *, alone: bool) -> bool:
        """Integers too if they have the statistic, where they are all that there is."""
        if self.of is not None and is_integer(x):
            return alone and statistic(self.of).key in INTEGER
        return super().takes_tensor(x, alone=alone)

    def require_tensor(self, x: Tensor) -> None:
        """Refuse integers if they do not have the statistic."""
        if self.of is not None:
            require_dtype(x, [statistic(self.of)])

    def build(self, site: HookSite) -> Edit:
        """A function that checks each tensor by its minimum and maximum: one pass, and a NaN makes both NaN.

        With `of`: a function that computes the statistic, which the site judges.
        """
        if self.of is not None:
            measure, rules = self._of_statistic(site, self.of)
            judge = site.judging(rules)
            return lambda x: judge(measure(x))
        low = self._bounds(self.min, -math.inf)
        high = self._bounds(self.max, math.inf)
        message = self.requirement()
        policy = self.policy
        report = site.check_result

        def check(x: Tensor) -> None:
            found = _within(low, high, x)
            if found is not None:
                ok, least, largest = found
                report(ok, message, policy, least, largest)

        return check

    def halves(self, site: HookSite) -> Halves:
        """The numbers of the statistic [R], or without `of` three: whether it passes, the least and the largest."""
        return self._halves_of_elements(site) if self.of is None else self._halves_of_statistic(site, self.of)

    def _halves_of_statistic(self, site: HookSite, of: str | Options) -> Halves:
        policy = self.policy
        measure_one, rules = self._of_statistic(site, of)

        def measure(x: Tensor) -> list[Tensor]:
            return [measure_one(x)]

        def reading() -> Reading:
            return partial(_judged, rules, policy, site.about_check())

        halves = Halves(measure, reading=reading, count=partial(count_along, self.dim, 1))
        if self.over is not None:
            halves = replace(halves, reading=None, report=site.judging(rules))
        if self.dim is not None or of in _ON:
            return halves
        wanted = statistic(of)
        return replace(halves, needs=needs_of([wanted]), finish=lambda rows: [wanted.define(rows)])

    def _halves_of_elements(self, site: HookSite) -> Halves:
        import torch

        policy = self.policy
        low = {dtype: float(bound) for dtype, bound in self._bounds(self.min, -math.inf).items()}
        high = {dtype: float(bound) for dtype, bound in self._bounds(self.max, math.inf).items()}
        message = self.requirement()

        def measure(x: Tensor) -> list[Tensor]:
            found = _within(low, high, x)
            if found is None:
                return [x.new_empty(0, dtype=torch.float64)]
            return [each.double().reshape(1) for each in found]

        def finish(rows: TensorsOfLanes) -> list[Tensor]:
            least = rows["min"]
            largest = rows["max"]
            return [(least >= low[torch.float32]) & (largest <= high[torch.float32]), least, largest]

        def reading() -> Reading:
            about = site.about_check()

            def records(record: dict[str, Any], numbers: list[float]) -> list[dict[str, Any]]:
                if not numbers:
                    return []
                ok, least, largest = numbers
                result = {
                    "ok": bool(ok),
                    "message": message,
                    "policy": policy,
                    "least": least,
                    "largest": largest,
                }
                return [record | result | about]

            return records

        return Halves(measure, reading=reading, count=lambda shape: 3, needs=EXTREMES, finish=finish)

    @property
    def not_in_graph(self) -> str | None:
        """None: a graph can contain all of it."""
        return None

    def _of_statistic(self, site: HookSite, of: str | Options) -> tuple[Callable[[Tensor], Tensor], Rules]:
        wanted = statistic(of)
        steps = None if self.over is None else self.over.steps
        rules = Rules(wanted.key, self.bounds, self.dim, steps, self.share or 0)
        measure: Callable[[Tensor], Tensor] = partial(_number, wanted, self.dim)
        if of == UPDATE_RATIO:
            site.reads_before = True
            measure = partial(_update_ratio, site, self.dim)
        elif of == LOSS:
            measure = _nothing
        return measure, rules

    def _bounds(self, bound: float | None, none: float) -> dict[dtype, Tensor]:
        """dtype -> the bound as a tensor [], since comparing with a Python float takes three times as long.

        A bound beyond the range of a dtype would become infinite there, so that an infinity would pass the check.
        """
        import torch

        wanted = none if bound is None else bound
        numbers = nearest_finite(wanted)
        if not self.finite and math.isinf(wanted):
            numbers = dict.fromkeys(numbers, wanted)
        return {
            dtype: widened(torch.tensor(number, dtype=dtype, device="cpu"))
            for dtype, number in numbers.items()
        }

    def requirement(self) -> str:
        """For messages: ``expected every element to be finite, at least 0 and at most 1``."""
        words = ["finite"] if self.finite else []
        if self.min is not None:
            words.append(f"at least {self.min:.12g}")
        if self.max is not None:
            words.append(f"at most {self.max:.12g}")
        text = words[-1] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
        return f"expected every element to be {text}"


def _within(
    low: Mapping[dtype, Any], high: Mapping[dtype, Any], x: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Whether all elements are within the bounds, and the least and the largest of them; None: there are none.

    low, high: dtype -> the bound, a number or a tensor []
    """
    import torch

    x = elements(x.detach())
    if not x.numel():
        return None
    if x.is_complex():
        x = x.abs()
    wide = widened(x)
    if torch.compiler.is_compiling():
        least, largest = extremes_in_graph(wide, range(wide.dim()))
    else:
        least, largest = wide.aminmax()
    dtype = x.dtype if x.dtype in low else torch.float32
    return (least >= low[dtype]) & (largest <= high[dtype]), least, largest


def _number(of: Statistic, dim: int | None, x: Tensor) -> Tensor:
    """[R] float64: the statistic of each row of the tensor; of an empty tensor [0]."""
    x = elements(x.detach())
    if dim is not None:
        require_dim(dim, x.shape, [of])
    rows = rows_of(x, dim)
    if not x.numel():
        return rows.x.flatten().double()
    return columns_of(rows, [of])[0]


def _judged(
    rules: Rules, policy: str, about: Mapping[str, Any], record: dict[str, Any], numbers: list[float]
) -> list[dict[str, Any]]:
    """The records of the rules that numbers of a compiled graph break."""
    import torch

    if not numbers:  # an empty tensor passes
        return []
    found = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return rules.judge({**record, "numbers": found, "judge": None, "policy": policy, **about})


def _nothing(x: Tensor) -> Tensor:
    """[1], which says no more than that the hook fired."""
    return x.new_zeros(1).double()


def _update_ratio(site: HookSite, dim: int | None, x: Tensor) -> Tensor:
    """[R] float64: norm(new - old) / norm(old) of a parameter; 0 where all old elements are 0."""
    before = site.before
    assert before is not None
    norm = statistic("norm")
    size = _number(norm, dim, before)
    return (_number(norm, dim, x.detach() - before) / size).where(size > 0, 0)


@dataclass
class LastPassed:
    """The tensors that passed each check in the current pass through the model, from the records of checks.

    A new pass begins with a new step, or when the same tensor is checked again.

    without_order: hooks whose checks do not come in the order of the computation: nothing is before another one
    """

    without_order: set[str] = field(default_factory=set)
    _passed: dict[str, dict[tuple[Any, ...], None]] = field(default_factory=dict)

    def before(self, record: Mapping[str, Any]) -> str | None:
        """Path and class of the module where the check passed last before this one; None: nowhere in this pass.

        A record of a check that passed is noted.
        """
        if record["hook"] in self.without_order:
            return None
        when = record["mode"], record["epoch"], record["step"]
        module = f"{record['module'] or '(root)'} ({record.get('class', '')})"
        checked = (module, record["path"], record["call"], when)
        since = self._passed.setdefault(record["hook"], {})
        if since and (checked in since or next(iter(since))[-1] != when):
            since.clear()
        before = next(reversed(since))[0] if since else None
        if record["ok"]:
            since[checked] = None
        return before


def verdict(record: Mapping[str, Any]) -> str:
    """What a check required, what it found, and the last place at which it passed, if there is one.

    ``expected every element to be finite, found nan; last good: layer2 (Sequential)``
    """
    least = float(record["least"])
    largest = float(record["largest"])
    text = str(record["message"])
    if "rule" not in record:
        text += f", found {least:.6g}"
        if least != largest and not math.isnan(least):
            text += f" to {largest:.6g}"
    if record.get("samples"):
        text += f" among the samples {listed(map(str, record['samples']), _SHOWN)}"
    if record.get("last_good"):
        text += f"; last good: {record['last_good']}"
    return text
