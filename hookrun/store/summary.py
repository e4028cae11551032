"""`summary_of`: a run directory in a few bounded words, also a damaged one; `headline`: what it did, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hookrun.engine.keys import key_of
from hookrun.errors import printable, shortened
from hookrun.store.description import MOST_LINE, Description, and_more, describe
from hookrun.store.files import MissingFile, StoreError
from hookrun.store.format import STATUS, SUMMARY
from hookrun.store.records import Status, checked, read_record
from hookrun.store.run_dir import cut_off

NOT_STARTED = "not started"
CUT_OFF = "cut off"
DAMAGED = "damaged"

MOST_HEADLINE = 400
"""Characters of a headline."""

_SHOWN = 4
"""Hooks and overrides of a headline."""
_WORD = 60
_NOT_SHOWN = frozenset({"experiment", "tags", "note"})
"""Keys of overrides that a headline leaves out: they are shown elsewhere."""


@dataclass(frozen=True)
class RunSummary(Description):
    """A run directory in a few bounded words.

    name:     its path from the folder in which it was found
    status:   of status.json; ``cut off`` if its process does not exist any more, ``not started`` if Hydra has begun the
              directory and no run has, ``damaged`` if status.json cannot be read
    started, ended: ISO times; ``""`` if not known
    duration: seconds that it took, or has run until now; None if that is not known
    damaged:  what is wrong with its files; ``""`` if they can be read
    """

    directory: Path = Path()
    name: str = ""
    status: str = NOT_STARTED
    reason: str = ""
    started: str = ""
    ended: str = ""
    duration: float | None = None
    damaged: str = ""


def summary_of(folder: Path, name: str | None = None) -> RunSummary:
    """The summary of the run directory, which may be damaged: then it says what is wrong. Writes nothing.

    name: its path from the folder in which it was found; None: its own name
    """
    status = dict[str, Any]()
    damaged = ""
    try:
        status = read_record(folder / STATUS, Status)
    except MissingFile:
        pass
    except StoreError as error:
        status = {"status": DAMAGED}
        damaged = str(error)
    described, faults = _described(folder, status)
    damaged = "; ".join(filter(None, [damaged, faults]))
    if reason := cut_off(status):
        status = {**status, "status": CUT_OFF, "reason": reason}
    started = status.get("started")
    ended = status.get("ended")
    return RunSummary(
        **vars(described),
        directory=folder,
        name=folder.name if name is None else name,
        status=shortened(status.get("status", NOT_STARTED), _WORD),
        reason=shortened(status.get("reason") or "", MOST_LINE),
        started=started or "",
        ended=ended or "",
        duration=None if reason else seconds_between(started, ended),
        damaged=damaged,
    )


def _described(folder: Path, status: Mapping[str, Any]) -> tuple[Description, str]:
    """What its status keeps or, if that is missing or not valid, what its other files say, and their faults."""
    with suppress(KeyError, ValueError):
        return checked(status[SUMMARY], Description), ""
    return describe(folder)


def seconds_between(started: Any, ended: Any) -> float | None:
    """Seconds from one ISO time to another, or to now; None where the first is missing or no time."""
    try:
        begin = datetime.fromisoformat(started)
        end = datetime.fromisoformat(ended) if ended else datetime.now(UTC)
        return max((end - begin).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None


def headline(summary: Description) -> str:
    """What the run did: ``clip_fc · cnn · grad clamp fc.weight, fc.bias · hooks.clip_fc.max=0.001``.

    Experiment or task, model, hooks with their sites, and what was typed, except tags and note. It has at most
    `MOST_HEADLINE` characters, and none on which a terminal acts.
    """
    first = summary.experiment or summary.task or "run"
    model = f"of {Path(summary.source).name}" if summary.source else summary.model
    parts = [first, model, hooks_line(summary), typed_line(summary)]
    text = printable(" · ".join(filter(None, parts)))
    return text if len(text) <= MOST_HEADLINE else f"{text[: MOST_HEADLINE - 1]}…"


def hooks_line(summary: Description) -> str:
    """``grad clamp fc.weight, fc.bias; forward capture fc and 3 more``; ``""`` without hooks."""
    lines = [hook.what for hook in summary.hooks[:_SHOWN]]
    return "; ".join(lines) + and_more(summary.hook_count - len(lines))


def typed_line(summary: Description) -> str:
    """``hooks.clip_fc.max=0.001 seed=1``: what was typed, except the experiment, tags and note."""
    texts = [shortened(text, _WORD) for text in summary.overrides if key_of(text) not in _NOT_SHOWN]
    beyond = summary.override_count - len(summary.overrides) + len(texts[_SHOWN:])
    return " ".join(texts[:_SHOWN]) + and_more(beyond)
