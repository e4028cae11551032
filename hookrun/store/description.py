"""What a run did, in a few bounded words: model, hooks, what was typed, the last metrics.

A run that ends keeps it in its status.json, so that hundreds of runs can be listed without reading their other files.
Of a run that has not ended, and of one of an earlier version, it is read from these files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from hookrun.engine.keys import GIVEN, key_of
from hookrun.errors import shortened
from hookrun.store import scores
from hookrun.store.config.stored import read_yaml
from hookrun.store.files import StoreError, open_inside
from hookrun.store.format import CONFIG, METRICS, OVERRIDES, PLAN, decode
from hookrun.store.records import Count, Name, PlannedHookRecord, PlanRecord, typed_record

T = TypeVar("T")

MOST_HOOKS = 8
MOST_SITES = 3
MOST_LISTED = 100
"""Overrides, tags and metrics."""
MOST_WORD = 120
"""Characters of a name."""
MOST_LINE = 500
"""Characters of an override and of the note."""
_TAIL = 2**18
"""Bytes read from the end of metrics.jsonl."""

Line = Annotated[str, Field(max_length=2 * MOST_LINE)]
Listed = Field(max_length=MOST_LISTED)


@dataclass(frozen=True)
class HookSummary:
    """One hook of a run. `str()` is ``clip_fc: grad clamp fc.weight, fc.bias and 60 more``.

    hook:  its hook type
    sites: the first modules or parameters that it matched
    count: how many there are
    """

    name: Name
    hook: Name
    action: Name
    sites: Annotated[tuple[Name, ...], Field(max_length=MOST_SITES)] = ()
    count: Count = 0

    @property
    def what(self) -> str:
        """Hook type, action and sites."""
        sites = [site or "(root)" for site in self.sites]
        if self.count > len(sites):
            sites = sites[: MOST_SITES - 1]
        return f"{self.hook} {self.action} {', '.join(sites)}{and_more(self.count - len(sites))}".rstrip()

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def and_more(count: int) -> str:
    """`` and 60 more``; ``""`` for none."""
    return f" and {count:,} more" if count > 0 else ""


@dataclass(frozen=True)
class Description:
    """What a run did. Names are shortened, and of long lists the beginning is kept.

    experiment: the name of its experiment, as it was typed; ``""`` if none was
    source:     the run that the task analyses, instead of a model and data
    hooks:      the first hooks of its plan; none if the run left them out (`hooked: false`)
    hook_count: how many there are
    overrides:  what was typed: the first overrides of the command line
    override_count: how many there are
    metrics:    ``split/name`` -> the last value, of a whole pass if there is one
    """

    experiment: Name = ""
    task: Name = ""
    model: Name = ""
    source: Name = ""
    hooks: Annotated[tuple[HookSummary, ...], Field(max_length=MOST_HOOKS)] = ()
    hook_count: Count = 0
    overrides: Annotated[tuple[Line, ...], Listed] = ()
    override_count: Count = 0
    tags: Annotated[tuple[Name, ...], Listed] = ()
    note: Line = ""
    metrics: Annotated[Mapping[Name, float], Listed] = field(default_factory=dict)


def describe(folder: Path) -> tuple[Description, str]:
    """What the files of a run say that it did, and what is wrong with them: ``""`` if they can be read.

    A file that does not exist says nothing.
    """
    faults: list[str] = []

    def attempt(name: str, read: Callable[[Path], T], otherwise: T) -> T:
        if not os.path.lexists(folder / name):
            return otherwise
        try:
            return read(folder / name)
        except (StoreError, OSError) as error:  # it must not cost a run its last status
            faults.append(str(error))
            return otherwise

    config: Any = attempt(CONFIG, partial(read_yaml, root=folder), {})
    typed: Any = attempt(OVERRIDES, partial(read_yaml, root=folder), [])
    plan = attempt(PLAN, partial(typed_record, model=PlanRecord), PlanRecord())
    metrics = attempt(METRICS, last_metrics, dict[str, float]())
    config = config if isinstance(config, dict) else {}
    overrides = [shortened(str(text), MOST_LINE) for text in typed] if isinstance(typed, list) else []
    hooks = plan.hooks if config.get("hooked", True) else []
    source = named_in(config, "task", "run")
    model = "" if source else model_in(config)
    if model == GIVEN or not (model or source):
        model = plan.model or model
    description = Description(
        experiment=_word(values_typed(overrides).get("experiment")),
        task=_word(named_in(config, "task")),
        model=_word(model),
        source=_word(source),
        hooks=tuple(map(_of_plan, hooks[:MOST_HOOKS])),
        hook_count=len(hooks),
        overrides=tuple(overrides[:MOST_LISTED]),
        override_count=len(overrides),
        tags=tuple(tags_of(config)),
        note=note_of(config),
        metrics=metrics,
    )
    return description, "; ".join(faults)


def values_typed(overrides: Iterable[str]) -> dict[str, str]:
    """Key -> value of overrides as they were typed; the last one of a key."""
    return {key_of(text): text.partition("=")[2] for text in overrides}


def named_in(config: Mapping[str, Any], section: str, key: str = "name") -> str:
    """The text of a key in a section of a stored configuration; ``""`` if there is none."""
    content = config.get(section)
    if not isinstance(content, dict):
        return ""
    return str(content.get(key) or "")


def model_in(config: Mapping[str, Any]) -> str:
    """The name of the model in a stored configuration; of a module that was given from Python its class."""
    name = named_in(config, "model")
    if name == GIVEN:
        name = named_in(config["model"], "args", "class").rpartition(".")[2] or GIVEN
    return name


def tags_of(config: Mapping[str, Any]) -> list[str]:
    """The tags in a stored configuration, as far as they are texts."""
    tags = config.get("tags")
    if not isinstance(tags, list):
        return []
    return [tag[:100] for tag in tags[:MOST_LISTED] if isinstance(tag, str)]


def note_of(config: Mapping[str, Any]) -> str:
    """The note in a stored configuration; ``""`` if there is none."""
    note = config.get("note")
    return shortened(note, MOST_LINE) if isinstance(note, str) else ""


def last_metrics(path: Path) -> dict[str, float]:
    """``split/name`` -> the last value in a file of metrics, of a whole pass if there is one.

    Learning rates are left out. Of a long file the end is read. Lines that are not valid are left out.
    """
    with open_inside(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        texts = file.read(_TAIL).split(b"\n")
    if size > _TAIL:
        del texts[0]  # its beginning was not read
    lines: list[dict[str, Any]] = []
    for text in texts:
        with suppress(ValueError):
            line = decode(text)
            if isinstance(line, dict):
                lines.append(line)
    metrics = scores.last_metrics(lines)
    return {_word(name): metrics[name] for name in islice(metrics, MOST_LISTED)}


def _of_plan(hook: PlannedHookRecord) -> HookSummary:
    sites = tuple(_word(match.path) for match in hook.targets[:MOST_SITES])
    return HookSummary(_word(hook.name), _word(hook.hook), _word(hook.action), sites, len(hook.targets))


def _word(text: str | None) -> str:
    return shortened(text or "", MOST_WORD)
