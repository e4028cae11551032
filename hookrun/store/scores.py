"""The result of a run by its objective, from the lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from hookrun.store.objective import Goal, direction_of, preferred
from hookrun.store.records import ObjectiveRecord, checked

Line = Mapping[str, Any]
ABOUT = frozenset({"split", "epoch", "step", "of", "module", "other", "score"})
"""Keys of a line that say what the line describes."""
OF_PARTS = frozenset({"kind", "layer", "head", "positions"})
"""The same for lines about parts of a model."""


def result_of(status: Mapping[str, Any], lines: Iterable[Line]) -> ObjectiveRecord | None:
    """The result in a run's status; for a run of an earlier version the result of its metrics, by a default objective.

    None if there is neither. Raises ValueError if the status holds something else.
    """
    if (stored := status.get("objective")) is not None:
        return checked(stored, ObjectiveRecord)
    lines = list(lines)
    metric = preferred(names(lines))
    direction = None if metric is None else direction_of(metric)
    return None if metric is None or direction is None else result(lines, Goal(metric, direction))


def is_batch(line: Line) -> bool:
    """Whether the line is of one logged batch of training. In earlier versions, which lack `of`, these have an `lr`."""
    return line["of"] == "batch" if line.get("of") else line.get("split") == "train" and "lr" in line


def is_part(line: Line) -> bool:
    """Whether the line is of one position or one sample; the means of the whole pass have another line."""
    return line.get("of") in ("position", "sample")


def measures(line: Line) -> dict[str, float]:
    """``split/name`` -> value, or ``name`` if the line has no split; empty for a part of a pass."""
    if is_part(line):
        return {}
    if "other" in line and line["other"] == line.get("module"):
        return {}  # the similarity of a module with itself is always 1
    split = line.get("split")
    head = f"{split}/" if split else ""
    return {
        f"{head}{name}": float(value)
        for name, value in line.items()
        if name not in ABOUT | OF_PARTS and isinstance(value, int | float) and not isinstance(value, bool)
    }


def latest(lines: Iterable[Line]) -> tuple[dict[str, float], dict[str, float]]:
    """``split/name`` -> the last value of each metric: of whole passes, and of single batches."""
    means: dict[str, float] = {}
    batches: dict[str, float] = {}
    for line in lines:
        of_line = batches if is_batch(line) else means
        of_line.update(measures(line))
    return means, batches


def last_metrics(lines: Iterable[Line]) -> dict[str, float]:
    """``split/name`` -> the last value, of a whole pass if there is one. Learning rates are left out."""
    means, batches = latest(lines)
    return {name: value for name, value in (batches | means).items() if not name.endswith("/lr")}


def names(lines: Iterable[Line]) -> list[str]:
    """Every metric with a finite value in a line that is not about a single batch."""
    return list(
        dict.fromkeys(
            name
            for line in lines
            if not is_batch(line)
            for name, value in measures(line).items()
            if math.isfinite(value)
        )
    )


def result(lines: Iterable[Line], goal: Goal) -> ObjectiveRecord:
    """The result of a run whose objective is known.

    The best epoch is the best of those with a finite value; a last epoch whose value is not finite has no result.
    Single batches are ignored.
    """
    of_passes = [(measures(line), line.get("epoch")) for line in lines if not is_batch(line)]
    values = [(measured[goal.metric], epoch) for measured, epoch in of_passes if goal.metric in measured]
    finite = [pair for pair in values[-1 if goal.of == "last" else 0 :] if math.isfinite(pair[0])]
    first_of_the_best = min if goal.direction == "minimize" else max
    best, epoch = first_of_the_best(finite, key=itemgetter(0), default=(None, None))
    epoch = epoch if isinstance(epoch, int) else None
    return ObjectiveRecord.model_construct(**vars(goal), value=best, epoch=epoch)  # lines may be from anybody
