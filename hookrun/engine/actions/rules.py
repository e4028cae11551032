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

    def require_width(self, place: Place, width: int) -> None:
        """ValueError if there are too many numbers, or another number of units than in the steps before."""
        steps = self.steps or 1
        if width * steps > MOST_KEPT:
            what = f"{width:,} units over {steps:,} steps"
            raise ValueError(
                f"{what} are more than {MOST_KEPT:,} numbers: name a shorter dimension, or fewer steps"
            )
        window = self._windows.get(place)
        if window is not None and window.numbers.shape[1] != width:
            raise ValueError(
                f"dim: {self.dim} has {width:,} units now and had {window.numbers.shape[1]:,} in earlier steps: name a "
                "dimension of constant length"
            )

    def judge(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The record of each rule that is broken now and was not a step ago, or by more units; at firings, else, one.

        record: what begins each of them, and `numbers` [R], a float64 tensor on the CPU
        """
        numbers = record.pop("numbers").numpy()
        del record["judge"]
        if self.steps is None:
            window = Window(1, len(numbers))
        else:
            place = record["mode"], record["path"], record["call"]
            window = self._windows.setdefault(place, Window(self.steps, len(numbers)))
        failures = list[dict[str, Any]]()
        for name, units in window.newly_broken(self.bounds, numbers):
            if name == NOT_FINITE or units.mean() >= self.share:
                failures.append({**record, **self._failure(name, numbers, units, record["step"])})
        if failures or self.steps is not None:
            return failures
        return [{**record, "ok": True}]

    def _failure(self, name: str, numbers: NDArray[Any], broken: NDArray[Any], step: int) -> dict[str, Any]:
        """What the record of a broken rule says. broken: [R] bool, the units that break it"""
        rule = next(iter(self.bounds)) if name == NOT_FINITE else name
        units = broken.nonzero()[0].tolist()
        found = numbers[units].tolist()
        subject = self.of
        shown = f"found {found[0]:.6g}"
        if self.dim is not None:
            subject = f"{self.of} of {len(units)} of {counted(len(numbers), 'unit')} (dim {self.dim})"
            more = ", …" if len(units) > _SHOWN else ""
            shown = f"units {', '.join(map(str, units[:_SHOWN]))}{more}"
        failure = {
            "ok": False,
            "message": f"{subject} {self._said(name)}, step {step}: {shown}",
            "least": min(found),
            "largest": max(found),
            "of": self.of,
            "rule": rule,
            "number": found[0] if self.dim is None else found,
            "bound": self.bounds[rule],
        }
        if self.steps is not None:
            failure["steps"] = self.steps
        if self.dim is not None:
            failure["units"] = units
        return failure

    def _said(self, name: str) -> str:
        """What a broken rule says of the statistic."""
        if name == NOT_FINITE:
            return "is not finite"
        bound = f"{self.bounds[name]:.12g}"
        if self.steps is None:
            return f"is above {bound}" if name == "max" else f"is below {bound}"
        steps = counted(self.steps, "step")
        return {
            "max": f"stayed above {bound} for {steps}",
            "min": f"stayed below {bound} for {steps}",
            "min_change": f"changed by less than {bound} of its mean in {steps}",
            "max_ratio": f"is more than {bound} times its mean over the {steps} before",
            "max_zscore": f"is more than {bound} standard deviations above its mean over the {steps} before",
        }[name]

    def state_dict(self) -> dict[str, Any]:
        """The windows, each with its place."""
        windows = list[dict[str, Any]]()
        for place, window in self._windows.items():
            windows.append({"place": list(place), **window.state_dict()})
        return {"windows": windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for saved in state["windows"]:
            window = Window(*saved["numbers"].shape)
            window.load_state_dict(saved)
            mode, path, call = saved["place"]
            self._windows[mode, path, call] = window


class Window:
    """The numbers of the last steps.

    numbers: [steps, R] float64; the row of a step is written over that of the step which leaves the window
    seen:    how many steps there were
    broken:  rule -> [R] bool, the units that broke it in the last step in which it was judged
    """

    def __init__(self, steps: int, width: int) -> None:
        import numpy as np

        self.numbers = np.zeros((steps, width))
        self.seen = 0
        self.broken: dict[str, NDArray[Any]] = {}

    @property
    def _is_full(self) -> bool:
        return self.seen >= len(self.numbers)

    def newly_broken(
        self, bounds: Mapping[str, float], now: NDArray[Any]
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """Add a step; (rule, all units that break it now) for each rule that a unit has begun to break.

        now: [R], the numbers of the step; one that is not finite leaves the window as it is
        """
        for name, units in self._broken(bounds, now).items():
            before = self.broken.get(name)
            self.broken[name] = units
            if (units if before is None else units & ~before).any():
                yield name, units

    def _broken(self, bounds: Mapping[str, float], now: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Rule -> [R] bool, the units that break it, for each rule that can be judged."""
        import numpy as np

        wrong = ~np.isfinite(now)
        broken = {NOT_FINITE: wrong}
        if wrong.any():
            return broken
        if self._is_full:
            broken |= {
                name: _EXCEEDS[name](self.numbers, now, bounds[name]) for name in _EXCEEDS.keys() & bounds
            }
        self.numbers[self.seen % len(self.numbers)] = now
        self.seen += 1
        if self._is_full:
            broken |= {name: _STAYS[name](self.numbers, bounds[name]) for name in _STAYS.keys() & bounds}
        return broken

    def state_dict(self) -> dict[str, Any]:
        """Its content as plain values and tensors."""
        import torch

        return {
            "numbers": torch.tensor(self.numbers),
            "seen": self.seen,
            "broken": {name: units.nonzero()[0].tolist() for name, units in self.broken.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace its content by a saved one."""
        import numpy as np

        self.numbers[:] = state["numbers"].numpy()
        self.seen = state["seen"]
        for name, units in state["broken"].items():
            self.broken[name] = np.isin(np.arange(self.numbers.shape[1]), units)


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


_EXCEEDS = {"max_ratio": _ratio_exceeds, "max_zscore": _zscore_exceeds}
"""Rule -> a function of the steps before [steps, R], the numbers now [R] and the bound: the units that break it."""

_STAYS = {
    "min": lambda window, bound: (window < bound).all(0),
    "max": lambda window, bound: (window > bound).all(0),
    "min_change": _stays_same,
}
"""Rule -> a function of a full window [steps, R] and of the bound: the units that break it."""
