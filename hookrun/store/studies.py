"""What the studies add to a run directory and to `Run`: each folder of hookrun/studies may have a module `records`.

Such a module may define `STREAMS`, file name -> the model of its lines, which its task appends during the run, and
functions for which a `Run` asks by their names. Its `answer_of(run)` is what the page of such a run shows first, as
data with the key `what`; None for a run of another study.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from hookrun.engine.discovery import modules_named
from hookrun.store.files import StoreError
from hookrun.store.records import STREAMS, Record

STUDIES = "hookrun.studies"
PLOTS = "hookrun.report.plots"


@cache
def study_records() -> tuple[ModuleType, ...]:
    """The module `records` of each study that has one."""
    return tuple(modules_named(STUDIES, "records"))


@cache
def streams() -> Mapping[str, type[Record]]:
    """The files of JSON lines in a run directory, to which lines are appended during the run: name -> a line."""
    models = dict(STREAMS)
    for records in study_records():
        models |= getattr(records, "STREAMS", {})
    return models


def functions_of_studies(name: str) -> Iterator[Callable[..., Any]]:
    """The function of this name of each study that has it."""
    for records in study_records():
        if hasattr(records, name):
            yield getattr(records, name)


def answer_of(run: Any) -> dict[str, Any] | None:
    """What the page of a `Run` shows first, as data: the answer of its study, else its last metrics; None without any.

    StoreError if a file of the run is damaged.
    """
    from hookrun.store.scores import last_metrics

    for of_study in functions_of_studies("answer_of"):
        answer: dict[str, Any] | None = of_study(run)
        if answer is not None:
            return answer
    metrics = last_metrics(run.metrics)
    return {"what": "metrics", "metrics": metrics} if metrics else None


def ask_study(name: str, *values: Any, **options: Any) -> Any:
    """What the function of this name returns. StoreError if no study has it: its folder was removed."""
    for function in functions_of_studies(name):
        return function(*values, **options)
    raise StoreError(f"this installation of hookrun has no study with {name}()")


def ask_report(name: str, *values: Any) -> Any:
    """What a function of `hookrun.report.plots` returns: the report, which stands above the store, draws a run."""
    return getattr(import_module(PLOTS), name)(*values)
