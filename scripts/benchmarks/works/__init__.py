"""The measurements: one file for each subject, one function for each row of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.measure import Result, Settings
from benchmarks.works import (
    capture,
    device,
    effects,
    graph,
    hooks,
    install,
    lm,
    loop,
    peers,
    ranks,
    rows,
    selectors,
    start,
    stats,
)


@dataclass(frozen=True)
class Work:
    """One row of the table. subjects: the subjects on the command line that include it."""

    measure: Callable[[Settings], Result]
    subjects: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.measure.__name__


DEVICE = "device"
"""The subject that needs a GPU, or counts waits on a device that changes the process: not one of `all`."""

_ROWS = {
    ("selectors",): selectors.ROWS,
    ("start",): start.ROWS,
    ("install",): install.ROWS,
    ("hooks", "peers"): hooks.WITH_PEERS,
    ("hooks",): hooks.ROWS,
    ("peers",): peers.ROWS,
    ("stats",): stats.ROWS,
    ("graph",): graph.ROWS,
    ("lm",): lm.ROWS,
    ("effects",): effects.ROWS,
    ("loop",): loop.ROWS,
    ("ranks",): ranks.ROWS,
    ("capture",): capture.ROWS,
    ("rows",): rows.ROWS,
    (DEVICE,): device.ROWS,
}
WORKS = tuple(Work(measure, subjects) for subjects, works in _ROWS.items() for measure in works)
SUBJECTS = (
    "hooks",
    "start",
    "install",
    "selectors",
    "capture",
    "rows",
    "stats",
    "graph",
    "loop",
    "ranks",
    "lm",
    "effects",
    "peers",
    DEVICE,
)


def of_subject(subject: str) -> Iterator[Work]:
    """The rows of one subject; ``all``: all rows except those of `device`."""
    of_all = subject == "all"
    return (work for work in WORKS if subject in work.subjects or (of_all and DEVICE not in work.subjects))
