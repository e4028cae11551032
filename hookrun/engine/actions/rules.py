"""Rules: the bounds of `check` on a statistic, judged on the host, at each firing or over the last steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hookrun.errors import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHOWN = 4
"""How many units a message names."""

NOT_FINITE = "finite"
"""What every number breaks that is NaN or infinite, whatever the rules are."""

_SAID = {NOT_FINITE: "is not finite", "max": "is above {bound}", "min": "is below {bound}"}
_SAID_OF_STEPS = {
    NOT_FINITE: "is not finite",
    "max": "stayed above {bound} for {steps}",
    "min": "stayed below {bound} for {steps}",
    "min_change": "changed by less than {bound} of its mean in {steps}",
    "max_ratio": "is more than {bound} times its mean over the {steps} before",
    "max_zscore": "is more than {bound} standard deviations above its mean over the {steps} before",
}
"""What a message says of a broken rule."""

MOST_KEPT = 1 << 22
"""The largest number of numbers in a window."""


Place = tuple[str, str, int]
"""What has a window of its own: the mode, the path of the tensor in the value, the call of the module in a forward."""


class Rules:
    """The rules of a hook at one module or parameter, and the windows of what they have seen there.

    of:     key of the statistic
    bounds: name of each rule -> its bound
    dim:    the dimension of the units that have a number each; None: one number
    steps:  the length of a window; None: each firing is judged by itself
    share:  the share of the units that have to break a rule before that is reported
    """

    def __init__(
        self, of: str, bounds: Mapping[str, float], dim: int | None, steps: int | None, share: float
    ) -> None:
        self.of = of
        self.bounds = bounds
        self.dim = dim
        self.steps = steps
        self.share = share
        self._windows = dict[Place, Window]()
        self._widths = dict[Place, int]()

    def require_width(self, place: Place, width: int) -> None:
        """ValueError if there are too many numbers, or another number of units than before in the same window."""
        if self.steps is None:
            return
        if width * self.steps > MOST_KEPT:
            what = f"{width:,} units over {self.steps:,} steps"
            raise ValueError(
                f"{what} are more than {MOST_KEPT:,} numbers: name a shorter dimension, or fewer steps"
            )
        before = self._widths.setdefault(place, width)
        if before != width:
            raise ValueError(
                f"dim: {self.dim} has {width:,} units now and had {before:,} before: name a dimension of constant "
                "length"
            )

    def judge(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """A record of each rule that a unit has begun to break; of a firing that is judged by itself, else one.

        record: how each of them begins, and `numbers` [R], a float64 tensor on the CPU
        """
        numbers = record.pop("numbers").numpy()
        del record["judge"]
        if self.steps is None:
            window = Window(1, len(numbers))
        else:
            place = record["mode"], record["path"], record["call"]
            window = self._windows.setdefault(place, Window(self.steps, len(numbers)))
        failures: list[dict[str, Any]] = []
        for name, units in window.begins_to_break(self.bounds, numbers):
            if name == NOT_FINITE or len(units) >= self.share * len(numbers):
                failures.append({**record, **self._failure(name, units, numbers, record["step"])})
        if failures or self.steps is not None:
            return failures
        return [{**record, "ok": True}]

    def _failure(self, name: str, units: list[int], numbers: NDArray[Any], step: int) -> dict[str, Any]:
        """What the record of a broken rule says."""
        rule = next(iter(self.bounds)) if name == NOT_FINITE else name
        bound = self.bounds[rule]
        found = numbers[units].tolist()
        of = self.of
        shown = f"found {found[0]:.6g}"
        if self.dim is not None:
            of = f"{of} of {len(units)} of {counted(len(numbers), 'unit')} (dim {self.dim})"
            more = ", …" if len(units) > _SHOWN else ""
            shown = f"units {', '.join(map(str, units[:_SHOWN]))}{more}"
        texts = _SAID if self.steps is None else _SAID_OF_STEPS
        said = texts[name].format(bound=f"{bound:.12g}", steps=counted(self.steps or 1, "step"))
        failure = {
            "ok": False,
            "message": f"{of} {said}, step {step}: {shown}",
            "least": min(found),
            "largest": max(found),
            "of": self.of,
            "rule": rule,
            "number": found[0] if self.dim is None else found,
            "bound": bound,
        }
        if self.steps is not None:
            failure["steps"] = self.steps
        if self.dim is not None:
            failure["units"] = units
        return failure

    def state_dict(self) -> dict[str, Any]:
        """The windows, as plain values and tensors."""
        windows: list[Any] = []
        for place, window in self._windows.items():
            windows.append([list(place), window.numbers.clone(), window.seen, dict(window.broken)])
        return {"of": self.of, "steps": self.steps, "windows": windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; windows of another statistic or length, in another plan, begin anew."""
        if (state["of"], state["steps"]) != (self.of, self.steps):
            return
        for place, numbers, seen, broken in state["windows"]:
            window = self._windows[tuple(place)] = Window(*numbers.shape)
            window.numbers.copy_(numbers)
            window.seen = seen
            window.broken.update(broken)
            self._widths[tuple(place)] = numbers.shape[1]


class Window:
    """The numbers of the last steps.

    numbers: [steps, R] float64; the row of a step is written over that of the step which leaves the window
    seen:    how many steps there were
    broken:  rule -> the units that broke it in the last step in which it was judged
    """

    def __init__(self, steps: int, width: int) -> None:
        import torch

        self.numbers = torch.zeros(steps, width, dtype=torch.float64, device="cpu")
        self._rows = self.numbers.numpy()
        self.seen = 0
        self.broken = dict[str, list[int]]()

    def begins_to_break(
        self, bounds: Mapping[str, float], now: NDArray[Any]
    ) -> Iterator[tuple[str, list[int]]]:
        """Add a step; (rule, all units that break it now) for each rule that a unit did not break before.

        now: [R], the numbers of the step; if one is not finite, the window stays as it is
        """
        for name, broken in self._broken(bounds, now):
            units = broken.nonzero()[0].tolist()
            before = self.broken.get(name, ())
            self.broken[name] = units
            if not set(before).issuperset(units):
                yield name, units

    def _broken(self, bounds: Mapping[str, float], now: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
        """(rule, [R] bool: the units that break it), for each rule that can be judged."""
        import numpy as np

        wrong = ~np.isfinite(now)
        yield NOT_FINITE, wrong
        if wrong.any():
            return
        steps = len(self._rows)
        for name in _OF_STEPS_BEFORE:
            if name in bounds and self.seen >= steps:
                yield name, _OF_STEPS_BEFORE[name](self._rows, now, bounds[name])
        self._rows[self.seen % steps] = now
        self.seen += 1
        for name in _OF_WINDOW:
            if name in bounds and self.seen >= steps:
                yield name, _OF_WINDOW[name](self._rows, bounds[name])


def _quotient(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[Any]:
    """part / whole; infinite where only the whole is 0, and 0 where the part is."""
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(part == 0, 0.0, part / whole)


def _ratio_exceeds(before: NDArray[Any], now: NDArray[Any], bound: float) -> Any:
    return _quotient(abs(now), abs(before.mean(0))) > bound


def _zscore_exceeds(before: NDArray[Any], now: NDArray[Any], bound: float) -> Any:
    return _quotient(now - before.mean(0), before.std(0, ddof=1)) > bound


def _stays_same(window: NDArray[Any], bound: float) -> Any:
    return _quotient(window.max(0) - window.min(0), abs(window.mean(0))) < bound


_OF_STEPS_BEFORE = {"max_ratio": _ratio_exceeds, "max_zscore": _zscore_exceeds}
"""Rule -> a function of the steps before [steps, R], the numbers now [R] and the bound: the units that break it."""

_OF_WINDOW = {
    "min": lambda window, bound: (window < bound).all(0),
    "max": lambda window, bound: (window > bound).all(0),
    "min_change": _stays_same,
}
"""Rule -> a function of a full window [steps, R] and of the bound: the units that break it."""
