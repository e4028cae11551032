"""`runs`: the runs below a folder as a sequence, the newest first, with a table, filters and sorting."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from hookrun.engine.keys import key_of
from hookrun.errors import Problem, counted, nearest, refuse, shortened
from hookrun.store.files import StoreError, by_number, os_errors
from hookrun.store.format import HYDRA, STATUS, State
from hookrun.store.run_dir import outputs_folder
from hookrun.store.summary import CUT_OFF, DAMAGED, NOT_STARTED, RunSummary, hook_line, summary_of

if TYPE_CHECKING:
    from hookrun.store.reader import Run

STATUSES = (*get_args(State), CUT_OFF, NOT_STARTED, DAMAGED)
"""What a run may have as its status."""


def hook_lines(summary: RunSummary) -> list[str]:
    """``clip_fc: grad clamp fc.weight, fc.bias`` for each hook."""
    return [f"{hook.name}: {hook_line(hook)}" for hook in summary.hooks]


def hook_words(summary: RunSummary) -> list[str]:
    """The name, hook type, action and sites of each hook."""
    words = list[str]()
    for hook in summary.hooks:
        words += [hook.name, hook.hook, hook.action, *hook.sites]
    return words


COLUMNS: Mapping[str, Callable[[RunSummary], Any]] = {
    "directory": lambda summary: str(summary.path),
    "name": lambda summary: summary.name,
    "started": lambda summary: summary.started,
    "duration": lambda summary: summary.seconds,
    "status": lambda summary: summary.status,
    "experiment": lambda summary: summary.experiment,
    "task": lambda summary: summary.task,
    "model": lambda summary: summary.model,
    "hooks": hook_lines,
    "overrides": lambda summary: list(summary.overrides),
    "tags": lambda summary: list(summary.tags),
    "note": lambda summary: summary.note,
    "reason": lambda summary: summary.reason,
    "damaged": lambda summary: summary.damaged,
}
"""Column of the table -> its value; `duration` is in seconds."""

_THREADS = 8
"""How many files are read at a time: most of the time is the disk's, or that of a network."""

_CLOSED = {"status": STATUSES}
"""Column -> the values that it may have, which are right also if no run has them."""


class Runs(Sequence["Run"]):
    """The runs below a folder, as they were when `runs` read them, the newest first.

    An index gives a `Run`, which reads its files when they are used; a slice gives `Runs`.

    folder:    the folder
    summaries: what each run did, in the same order
    """

    def __init__(
        self, folder: Path, summaries: Iterable[RunSummary], of: Sequence[RunSummary] | None = None
    ) -> None:
        self.folder = folder
        self.summaries = tuple(summaries)
        self._of = self.summaries if of is None else of  # before any filter

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Run | Runs:
        from hookrun.store.reader import Run

        if isinstance(index, slice):
            return Runs(self.folder, self.summaries[index], self._of)
        return Run(self.summaries[index].path)

    def __len__(self) -> int:
        return len(self.summaries)

    def __repr__(self) -> str:
        counts = dict[str, int]()
        for summary in self.summaries:
            counts[summary.status] = counts.get(summary.status, 0) + 1
        said = ", ".join(f"{count:,} {shortened(status)}" for status, count in counts.items())
        return f"<{counted(len(self), 'run')} of {self.folder}{f': {said}' if said else ''}>"

    def where(self, conditions: Mapping[str, Any] | None = None, /, **others: Any) -> Runs:
        """The runs of which each condition holds: ``runs.where({"val/accuracy": lambda x: x > 0.9}, status="done")``.

        A key is a column of the table, a metric (``val/accuracy``) or the key of an override that was typed
        (``{"hooks.clip_fc.max": 0.001}``). A value is

        - a text or a number: what the run has there, or one of its tags or overrides; of `hooks` the name, hook type,
          action or a site of a hook; in a text ``*`` stands for any characters
        - a list of them: one of them
        - a function of what the run has there; it is not asked about runs that have nothing

        SpecError, with the nearest names, for keys that no run has, and for texts that no run has there.
        """
        wanted = {**(conditions or {}), **others}
        refuse(chain.from_iterable(starmap(self._problems, wanted.items())))
        kept = list(self.summaries)
        for key, condition in wanted.items():
            kept = [summary for summary in kept if _fits(value_of(summary, key), condition)]
        return Runs(self.folder, kept, self._of)

    def sorted(self, by: str, reverse: bool = False) -> Runs:
        """The runs ordered by a key as in `where`, which may raise SpecError; those with nothing there come last."""
        refuse(self._problems(by))
        present = list[tuple[tuple[bool, float, str], int]]()
        missing = list[RunSummary]()
        for place, summary in enumerate(self.summaries):
            value = value_of(summary, by)
            if _is_missing(value):
                missing.append(summary)
            else:
                present.append((_sort_key(value), place))
        present.sort(key=lambda pair: pair[0], reverse=reverse)
        ordered = [self.summaries[place] for _, place in present]
        return Runs(self.folder, [*ordered, *missing], self._of)

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that any of the runs has: ``split/name``."""
        names = dict[str, None]()
        for summary in self.summaries:
            names |= dict.fromkeys(summary.metrics)
        return sorted(names)

    def table(self, form: Literal["pandas", "arrow"] = "pandas") -> Any:
        """The runs as a pandas DataFrame or an Arrow table, a row for each, with a column for each metric.

        `started` is a time, `duration` is in seconds, and `hooks`, `overrides` and `tags` are texts.
        HookrunError if the library is not installed.
        """
        from hookrun.store.tables import as_table

        columns = dict[str, list[Any]]()
        for name, read in COLUMNS.items():
            columns[name] = [_cell(name, read(summary)) for summary in self.summaries]
        for name in self.metrics:
            columns[name] = [summary.metrics.get(name) for summary in self.summaries]
        return as_table(columns, form)

    def _keys(self) -> Iterator[str]:
        yield from COLUMNS
        for summary in self._of:
            yield from summary.metrics
            yield from map(key_of, summary.overrides)

    def _problems(self, key: str, condition: Any = None) -> Iterator[Problem]:
        """A key that no run has, and texts that no run has there, which are most probably mistakes."""
        keys = set(self._keys())
        if key not in keys:
            yield Problem(shortened(key), f"no run of {self.folder} has it", nearest(key, keys))
            return
        texts = [each for each in _one_of(condition) if isinstance(each, str) and "*" not in each]
        if not texts:
            return
        seen = set[str](_CLOSED.get(key, ()))
        for summary in self._of:
            seen.update(map(str, _one_of(value_of(summary, key))))
        for text in texts:
            if text not in seen:
                near = nearest(text, seen - {"None", ""})
                yield Problem(key, f"no run of {self.folder} has {shortened(repr(text))} there", near)


def runs(folder: str | os.PathLike[str] | None = None) -> Runs:
    """The runs below a folder, the newest first; damaged ones too. Reads a small file of each, and writes nothing.

    Of a sweep's directory its jobs, of a run's directory that run. Folders are searched at any depth, except those
    inside a run, hidden ones and links, such as `latest`.

    folder: None: `outputs`, where the command line puts single runs; sweeps are in `multirun`

    StoreError if there is no such folder.
    """
    place = outputs_folder() if folder is None else Path(folder)
    with os_errors(f"cannot read {place}"):
        root = place.expanduser().resolve()
        if not root.is_dir():
            raise StoreError(_not_a_folder(root))
        folders = [entry.path for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    with ThreadPoolExecutor(_THREADS) as pool:
        paths = [root] if is_run(root) else list(chain.from_iterable(pool.map(_runs_at, folders)))
        found = list(pool.map(partial(_summary_in, root), paths))
    found.sort(
        key=lambda summary: by_number(summary.name), reverse=True
    )  # of those that began at the same time
    found.sort(key=_began, reverse=True)
    return Runs(root, found)


def _not_a_folder(place: Path) -> str:
    if place.exists():
        return f"{place} is a file, not a folder of runs"
    parent = next(parent for parent in place.parents if parent.is_dir())
    names = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    first = place.relative_to(parent).parts[0]
    return f"there is no folder {parent / first}: {nearest(first, names)}"


def _runs_at(path: str) -> list[Path]:
    """The folder if it holds a run, otherwise the folders below it that do."""
    folder = Path(path)
    if folder.name.startswith("."):
        return []
    return [folder] if is_run(folder) else list(run_folders(folder))


def _summary_in(root: Path, path: Path) -> RunSummary:
    name = path.name if path == root else str(path)[len(str(root)) :].lstrip("/")
    return summary_of(path, name)


def run_folders(folder: Path) -> Iterator[Path]:
    """Directories below `folder` that hold a run, or where Hydra has begun one; their own folders are not searched."""
    for where, folders, files in os.walk(folder):
        path = Path(where)
        if path != folder and (STATUS in files or HYDRA in folders):
            folders.clear()
            yield path
        folders[:] = [name for name in folders if not name.startswith(".")]


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run, or Hydra has begun one there."""
    return os.path.lexists(folder / STATUS) or os.path.isdir(folder / HYDRA)


def value_of(summary: RunSummary, key: str) -> Any:
    """What the run has in a column, as a metric, or as the value of an override of this key; None if nothing."""
    if key == "hooks":
        return hook_words(summary)
    if key in COLUMNS:
        return COLUMNS[key](summary)
    if key in summary.metrics:
        return summary.metrics[key]
    values = [text.partition("=")[2] for text in summary.overrides if key_of(text) == key]
    return values[-1] if values else None


def _began(summary: RunSummary) -> str:
    """When it began; of a run that does not say it, when its directory was changed last."""
    if summary.started:
        return summary.started
    try:
        changed = summary.path.stat().st_mtime
    except OSError:
        return ""
    return datetime.fromtimestamp(changed, UTC).isoformat(timespec="milliseconds")


def _one_of(value: Any) -> Sequence[Any]:
    """The members of a list, a tuple or a set; any other value alone."""
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or value == [] or value != value  # NaN


def _fits(value: Any, condition: Any) -> bool:
    if callable(condition):
        return not _is_missing(value) and bool(condition(value))
    return any(_equals(part, each) for part in _one_of(value) for each in _one_of(condition))


def _equals(value: Any, condition: Any) -> bool:
    """Whether they are the same; a text of the run is compared with the text of a number."""
    if isinstance(condition, str) and "*" in condition:
        return fnmatchcase(str(value), condition.replace("[", "[[]"))
    if isinstance(value, str) or isinstance(condition, str):
        return str(value) == str(condition)
    return bool(value == condition)


def _sort_key(value: Any) -> tuple[bool, float, str]:
    """Numbers by size, also those of overrides, then texts."""
    if isinstance(value, list):
        value = ", ".join(value)
    try:
        return False, float(value), ""
    except ValueError:
        return True, 0.0, str(value)


def _cell(column: str, value: Any) -> Any:
    if column == "started":
        return _time(value)
    if column == "overrides":
        return " ".join(value)
    return "; ".join(value) if isinstance(value, list) else value


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
