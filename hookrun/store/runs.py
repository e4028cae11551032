"""`runs`: the runs below a folder as a sequence, the newest first, with a table, filters and sorting."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from hookrun.engine.html import MOST_ROWS, Shown, View
from hookrun.engine.keys import key_of
from hookrun.errors import Problem, counted, misnamed, nearest, refuse, renamed, shortened, shown, spec_error
from hookrun.store.description import values_typed
from hookrun.store.files import StoreError, by_number, os_errors
from hookrun.store.format import HYDRA, STATUS, State
from hookrun.store.run_dir import outputs_folder
from hookrun.store.summary import CUT_OFF, DAMAGED, NOT_STARTED, RunSummary, headline, summary_of
from hookrun.store.tables import as_table

if TYPE_CHECKING:
    from hookrun.store.reader import Run

COLUMNS = (
    "directory",
    "name",
    "started",
    "duration",
    "status",
    "experiment",
    "task",
    "model",
    "hooks",
    "overrides",
    "tags",
    "note",
    "reason",
    "damaged",
)
"""The fields of a summary that are columns of the table."""

_BETWEEN = {"hooks": "; ", "overrides": " "}
_STATUSES = (*get_args(State), CUT_OFF, NOT_STARTED, DAMAGED)
_THREADS = 8
"""How many runs are looked at at a time: most of the time is the disk's, or that of a network."""


class Runs(Shown, Sequence["Run"]):
    """The runs below a folder, as they were when `runs` read them, the newest first.

    An index gives a `Run`, which reads its files when they are used; a slice gives `Runs`.

    folder:    the folder
    summaries: what each run did, in the same order
    """

    def __init__(
        self, folder: Path, summaries: Iterable[RunSummary], all_of_them: Sequence[RunSummary] | None = None
    ) -> None:
        self.folder = folder
        self.summaries = tuple(summaries)
        self._all = self.summaries if all_of_them is None else all_of_them  # before any filter

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Run | Runs:
        if isinstance(index, slice):
            return Runs(self.folder, self.summaries[index], self._all)
        from hookrun.store.reader import Run

        return Run(self.summaries[index].directory)

    def __len__(self) -> int:
        return len(self.summaries)

    def __repr__(self) -> str:
        counts = Counter(summary.status for summary in self.summaries)
        states = ", ".join(f"{count:,} {shortened(status)}" for status, count in counts.items())
        return f"<{counted(len(self), 'run')} of {self.folder}: {states or 'none'}>"

    def _view(self) -> View:
        rows: list[list[str | float | None]] = []
        for summary in self.summaries[:MOST_ROWS]:
            about = [summary.name, summary.started[:16], summary.duration, summary.status]
            rows.append([*about, *map(summary.metrics.get, self.metrics), headline(summary)])
        heads = ("run", "started", "seconds", "status", *self.metrics, "what")
        return View(repr(self)[1:-1], heads, rows, len(self))

    def where(self, conditions: Mapping[str, Any] | None = None, /, **others: Any) -> Runs:
        """The runs of which each condition holds: ``runs.where({"val/accuracy": lambda x: x > 0.9}, status="done")``.

        A key is a column of the table, a metric (``val/accuracy``) or the key of an override that was typed
        (``{"hooks.clip_fc.max": 0.001}``). A value is

        - a text or a number: what the run has there, or one of its tags or overrides, or a text within a line of
          `hooks`; ``*`` stands for any characters
        - None, or an empty text: the run has nothing there
        - a list of them, of which one must fit
        - a function of what the run has there; it is not called for a run that has nothing

        SpecError, with the nearest names, for keys that no run has, and for texts that no run has there.
        """
        if conditions is not None and not isinstance(conditions, Mapping):
            hint = 'write status="done", or {"val/accuracy": 0.9}'
            raise spec_error("where", f"found {shown(conditions)}, expected a mapping", hint)
        wanted = {**(conditions or {}), **others}
        refuse(chain.from_iterable(starmap(self._problems, wanted.items())))
        fitting = self.summaries
        for key, condition in wanted.items():
            fitting = tuple(summary for summary in fitting if _holds(summary, key, condition))
        return Runs(self.folder, fitting, self._all)

    def sorted(self, by: str, reverse: bool = False) -> Runs:
        """The runs ordered by a key as in `where`; those that have nothing there, or NaN, come last."""
        refuse(self._problems(by))
        ordered: list[RunSummary] = []
        last: list[RunSummary] = []
        for summary in self.summaries:
            is_nan = value_of(summary, by) != value_of(summary, by)
            place = ordered if has_value(summary, by) and not is_nan else last
            place.append(summary)
        ordered.sort(key=lambda summary: _sort_key(value_of(summary, by)), reverse=reverse)
        return Runs(self.folder, [*ordered, *last], self._all)

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that any of the runs has, ``split/name``: those of most runs first."""
        counts = Counter(chain.from_iterable(summary.metrics for summary in self.summaries))
        return sorted(
            counts,
            key=lambda name: (-counts[name], name.startswith("train/"), "accuracy" not in name, name),
        )

    def table(self, form: Literal["pandas", "arrow"] = "pandas") -> Any:
        """The runs as a pandas DataFrame or an Arrow table, a row for each, with a column for each metric.

        `started` is a time, `duration` is in seconds, and `hooks`, `overrides` and `tags` are texts.
        HookrunError if the library is not installed.
        """
        columns: dict[str, list[Any]] = {}
        for key in (*COLUMNS, *self.metrics):
            columns[key] = [cell_of(summary, key) for summary in self.summaries]
        columns["started"] = list(map(_time, columns["started"]))
        return as_table(columns, form)

    def _problems(self, key: str, condition: Any = None) -> Iterator[Problem]:
        """A key that no run has, and a text that no run has there, which are most probably mistakes."""
        typed = chain.from_iterable(summary.overrides for summary in self._all)
        keys = {*COLUMNS, *map(key_of, typed), *chain.from_iterable(summary.metrics for summary in self._all)}
        if not isinstance(key, str):
            yield Problem(shown(key), "is not a key", 'write a column or a metric, such as "started"')
            return
        if key not in keys:
            problem = Problem(shortened(key), f"no run of {self.folder} has it", nearest(key, keys))
            yield renamed(problem, key, keys, {key: condition})
            return
        texts = [each for each in _each(condition) if isinstance(each, str)]
        for text in texts:
            may_be_right = not text or "*" in text or (key == "status" and text in _STATUSES)
            if not may_be_right and not any(_holds(summary, key, text) for summary in self._all):
                seen = chain.from_iterable(_each(value_of(summary, key)) for summary in self._all)
                what = f"no run of {self.folder} has {shortened(repr(text))} there"
                yield misnamed(key, what, text, set(map(str, seen)) - {"", "None"})


def runs(folder: str | os.PathLike[str] | None = None) -> Runs:
    """The runs below a folder, the newest first; damaged ones too. Reads a small file of each, and writes nothing.

    Of a sweep's directory its jobs, of a run's directory that run. Folders are searched at any depth, except those
    inside a run, hidden ones and links, such as `latest`. A run that does not say when it began is sorted by its name.

    folder: None: `outputs`, where the command line puts single runs; sweeps are in `multirun`

    StoreError if there is no such folder.
    """
    root = (outputs_folder() if folder is None else Path(folder)).expanduser().resolve()
    if not root.is_dir():
        near = nearest(root.name, [path.name for path in root.parent.glob("*/")])
        raise StoreError(f"{root} is not a folder of runs: {near}")
    with os_errors(f"cannot read {root}"), ThreadPoolExecutor(_THREADS) as pool:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
        if is_run(root):
            names = [""]
        parts = [names[first::_THREADS] for first in range(_THREADS)]
        found = list(chain.from_iterable(pool.map(partial(_found_at, root), parts)))
    found.sort(key=lambda summary: (summary.started or summary.name, by_number(summary.name)), reverse=True)
    return Runs(root, found)


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run, or Hydra has begun one there."""
    return os.path.lexists(folder / STATUS) or os.path.isdir(folder / HYDRA)


def _found_at(root: Path, names: Iterable[str]) -> list[RunSummary]:
    """The summaries of the runs of these names in the folder, and of those below folders of these names."""
    found: list[RunSummary] = []
    for name in names:
        if name.startswith("."):
            continue
        folder = root / name
        can_be_read = os.access(folder, os.R_OK | os.X_OK)
        paths: Iterable[Path] = [folder]  # a folder that cannot be read is listed as damaged
        if can_be_read and not is_run(folder):
            paths = run_folders(folder)
        for path in paths:
            found.append(summary_of(path, str(path)[len(str(root)) :].lstrip("/") or root.name))
    return found


def run_folders(folder: Path) -> Iterator[Path]:
    """Directories below `folder` that hold a run, or where Hydra has begun one; their own folders are not searched."""
    for where, folders, files in os.walk(folder):
        path = Path(where)
        if path != folder and (STATUS in files or HYDRA in folders):
            folders.clear()
            yield path
        folders[:] = [name for name in folders if not name.startswith(".")]


def value_of(summary: RunSummary, key: str) -> Any:
    """What the run has in a column, as a metric, or as the value of an override of this key; None if nothing."""
    if key in COLUMNS:
        return getattr(summary, key)
    if key in summary.metrics:
        return summary.metrics[key]
    return values_typed(summary.overrides).get(key)


def cell_of(summary: RunSummary, key: str) -> Any:
    """The same as a number, a text or None."""
    value = value_of(summary, key)
    if isinstance(value, tuple):
        return _BETWEEN.get(key, ", ").join(map(str, value))
    return str(value) if isinstance(value, Path) else value


def has_value(summary: RunSummary, key: str) -> bool:
    """Whether the run has something there."""
    return value_of(summary, key) not in (None, "", ())


def _holds(summary: RunSummary, key: str, condition: Any) -> bool:
    if not has_value(summary, key):
        return any(each is None or each == "" for each in _each(condition))
    value = value_of(summary, key)
    if callable(condition):
        return bool(condition(value))
    return any(_is(part, each, key) for part in _each(value) for each in _each(condition))


def _is(value: Any, condition: Any, key: str) -> bool:
    """Whether they are the same text or number; what was typed is a text: ``1e-3``, ``true``."""
    text = str(condition).lower() if isinstance(condition, bool) else str(condition)
    if key == "hooks" and text:
        text = f"*{text}*"
    if "*" in text:
        return fnmatchcase(str(value), text.replace("[", "[[]"))
    return str(value) == text or _sort_key(value) == _sort_key(text)


def _each(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple | set | frozenset) else (value,)


def _sort_key(value: Any) -> tuple[bool, float, str]:
    """Numbers by size, also those that were typed, then texts."""
    with suppress(TypeError, ValueError):
        return False, float(value), ""
    return True, 0.0, str(value)


def _time(text: str) -> datetime | None:
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).astimezone(UTC)
    return None
