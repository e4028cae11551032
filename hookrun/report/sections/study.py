"""The results of an optimizing sweeper: the objective by trial, and the importance of each key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hookrun.report.draw.charts import Figure, Series, bars, lines
from hookrun.report.section import ReportSection
from hookrun.report.study import Trial
from hookrun.report.sweep_facts import SweepFacts

FEWEST = 4
"""Least number of trials with a value for which importance is computed."""
MOST_FITTED = 2_000
TREES = 64


@dataclass(frozen=True)
class History:
    """The trials.

    trials:  number of trials
    without: number of those that failed or have no finite value
    figures: the history, then the importance if there is one
    """

    trials: int
    without: int
    figures: list[Figure]


def _history(facts: SweepFacts) -> History | None:
    found = [trial for trial in facts.chosen if trial.value is not None]
    if not found:
        return None
    goal = facts.goals[0] if len(facts.goals) == 1 else None
    name = goal.metric if goal is not None else "objective"
    xs, ys = [float(trial.number) for trial in found], [float(trial.value or 0) for trial in found]
    series = [Series(name, xs, ys, dots=True)]
    if goal is not None:
        better = max if goal.direction == "maximize" else min
        series.append(Series("best so far", xs, list(accumulate(ys, better))))
    figures = [lines(f"{name} by trial", series, x="trial", y=name)]
    if shares := importance(found):
        figures.append(
            bars(
                f"importance for {name}",
                list(shares.values()),
                x="key",
                y="share",
                names=list(shares),
                note="the share of the objective's variance that a random forest explains by each key",
            )
        )
    return History(len(facts.chosen), len(facts.chosen) - len(found), figures)


def importance(trials: Sequence[Trial]) -> dict[str, float]:
    """Key -> its share of the variance of the values, largest first; the shares add up to 1.

    The mean decrease of impurity in a random forest over the keys, as Optuna's evaluator of that name: numbers as they
    are, other values one-hot. Empty for too few trials, keys with one value each, or equal objectives.
    """
    trials = [trial for trial in trials if trial.value is not None][-MOST_FITTED:]
    values = np.array([trial.value for trial in trials], dtype=float)
    columns = [
        (key, column)
        for key in dict.fromkeys(key for each in trials for key in each.params)
        for column in _columns([each.params.get(key, "") for each in trials])
    ]
    if len(trials) < FEWEST or not columns or np.ptp(values) == 0:
        return {}
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(n_estimators=TREES, random_state=0)
    forest.fit(np.stack([column for _, column in columns], axis=1), values)
    shares = dict[str, float]()
    for (key, _), share in zip(columns, forest.feature_importances_, strict=True):
        shares[key] = shares.get(key, 0.0) + float(share)
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _columns(texts: list[str]) -> list[np.ndarray]:
    """Columns [trials] of a key: one if its values are numbers, else one for each value; none if all are equal."""
    different = sorted(set(texts))
    if len(different) < 2:
        return []
    try:
        column = np.array([float(text) for text in texts])
        if np.isfinite(column).all() and np.abs(column).max() < np.finfo(np.float32).max:
            return [column]
    except ValueError:  # names
        pass
    return [np.array([text == value for text in texts], dtype=float) for value in different[:MOST_VALUES]]


MOST_VALUES = 100

SECTION = ReportSection("study", "Study", _history, "study.html")
