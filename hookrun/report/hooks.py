"""Each hook's part of the page: its row in the plan, its counts, and everything that it recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookrun.errors import HookrunError
from hookrun.hook_types import HOOK_TYPES
from hookrun.report.captures import Look, look
from hookrun.report.draw.charts import Figure
from hookrun.report.draw.text import counted
from hookrun.report.facts import Facts
from hookrun.report.records import over_steps, printed, statistics
from hookrun.report.sampling import Stream, streams
from hookrun.store.format import CAPTURES, PREDICTIONS

MOST_LOOKS = 40
"""Captured tensors that are drawn, the predictions not counted; every one is listed."""

MOST_HOOKS = 2_000

SHOWN_MODULES = 4

ON_PARAMETERS = {name for name, kind in HOOK_TYPES.items() if kind.on_parameters}


@dataclass(frozen=True)
class Row:
    """A line of the plan's table; `fired` is None where nobody has counted."""

    order: int
    name: str
    modules: list[str]
    more_modules: int
    classes: list[str]
    type: str
    action: str
    settings: str
    when: list[str]
    shapes: list[str | None]
    fired: int | None
    changed: float | None


@dataclass
class HookPart:
    """What a hook recorded.

    left: captured tensors that are not drawn
    """

    name: str
    title: str
    order: int = -1
    figures: list[Figure] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    left: list[Stream] = field(default_factory=list)
    printed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.figures or self.looks or self.left or self.printed)


def plan_rows(facts: Facts) -> list[Row]:
    """The plan's table, in firing order."""
    hooks = list(facts.planned.values())
    if len(hooks) > MOST_HOOKS:
        facts.notes.append(f"the plan has {len(hooks):,} hooks: the first {MOST_HOOKS:,} are shown")
    return [_row(order, hook, facts) for order, hook in enumerate(hooks[:MOST_HOOKS])]


def _row(order: int, hook: Mapping[str, Any], facts: Facts) -> Row:
    targets = hook["targets"]
    sites = [
        facts.sites[hook["name"], each["path"]]
        for each in targets
        if (hook["name"], each["path"]) in facts.sites
    ]
    total = sum(site["total"] for site in sites)
    keys = {key: hook[key] for key in ("target", "index") if key in hook}
    given = {key: value for key, value in {**keys, **hook["params"]}.items() if value is not None}
    return Row(
        order=order,
        name=hook["name"],
        modules=[each["path"] for each in targets[:SHOWN_MODULES]],
        more_modules=max(len(targets) - SHOWN_MODULES, 0),
        classes=[each["class"] for each in targets[:SHOWN_MODULES]],
        type=hook["hook"],
        action=hook["action"],
        settings=" ".join(f"{key}={_plain(value)}" for key, value in given.items()),
        when=_when(hook["when"]),
        shapes=[each["shape"] for each in targets[:SHOWN_MODULES]],
        fired=sum(site["fired"] for site in sites) if sites else None,
        changed=sum(site["changed"] for site in sites) / total if total else None,
    )


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_plain(each)}" for key, each in value.items() if each is not None)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


_ALWAYS = {"start": 0, "every": 1, "end": None}


def _when(when: Mapping[str, Any]) -> list[str]:
    """What differs from always."""
    parts = []
    for key, value in when.items():
        if value in (None, "any", 1.0) or key == "seed":
            continue
        if isinstance(value, Mapping):
            given = {name: each for name, each in value.items() if each != _ALWAYS.get(name)}
            value = " ".join(f"{name} {each}" for name, each in given.items())
        if value:
            parts.append(f"{key} {_plain(value)}")
    return parts


@dataclass(frozen=True)
class Silence:
    """A hook and the modules where it did nothing, and why."""

    hook: str
    why: str
    modules: tuple[str, ...]


def silences(facts: Facts) -> list[Silence]:
    """Hooks that matched and never fired, or found nothing to act on."""
    found = defaultdict[tuple[str, str], list[str]](list)
    for (hook, module), site in facts.sites.items():
        if site.get("silent"):
            found[hook, site["silent"]].append(module)
    return [Silence(hook, why, tuple(modules)) for (hook, why), modules in found.items()][:MOST_HOOKS]


def hook_parts(facts: Facts) -> list[HookPart]:
    """Every hook that recorded something, in firing order; predictions come last."""
    records = defaultdict[str, list[dict[str, Any]]](list)
    for record in facts.stats.records:
        records[str(record.get("hook"))].append(record)
    captured = _streams(facts, CAPTURES)
    names = list(dict.fromkeys([*captured, *records, *facts.planned]))[:MOST_HOOKS]
    names.sort(key=lambda name: facts.order.get(name, len(facts.order)))
    share = max(2, MOST_LOOKS // max(len(captured), 1))
    drawn = set(list(captured)[:MOST_LOOKS])
    parts = [
        _part(facts, name, records[name], captured.get(name, []), CAPTURES, share if name in drawn else 0)
        for name in names
    ]
    for streams_of in list(_streams(facts, PREDICTIONS).values())[:MOST_LOOKS]:
        part = _part(facts, "", [], streams_of, PREDICTIONS, share)
        part.title = "what the model predicted"
        part.name = "predictions"
        parts.append(part)
    return [part for part in parts if not part.is_empty]


def _part(
    facts: Facts,
    name: str,
    records: Sequence[dict[str, Any]],
    captured: Sequence[Stream],
    folder: str,
    share: int,
) -> HookPart:
    hook = facts.planned.get(name, {})
    sites = counted(len(hook.get("targets", [])), "parameter" if _on_parameters(hook) else "module")
    order = facts.order[name] if hook else -1
    part = HookPart(
        name, f"{hook.get('hook', '')}, {hook.get('action', '')} on {sites}" if hook else "", order
    )
    part.figures = statistics(facts, name, records)
    part.printed = printed(records)
    places = facts.places(name)
    captured = sorted(captured, key=lambda stream: places.get(stream.module, len(places)))
    part.looks = [look(facts.path / folder, stream, facts) for stream in captured[:share]]
    part.left = list(captured[share:])
    norms = {found.stream.label: found.norms for found in part.looks if found.norms is not None}
    if norms:
        part.figures += over_steps("norm of the captured gradient", norms, "step", "norm", by_layer=True)
    return part


def _on_parameters(hook: Mapping[str, Any]) -> bool:
    return hook.get("hook") in ON_PARAMETERS


def _streams(facts: Facts, folder: str) -> dict[str, list[Stream]]:
    """Hook -> what it captured."""
    found = defaultdict[str, list[Stream]](list)
    try:
        for stream in streams(facts.path / folder):
            found[stream.hook].append(stream)
    except HookrunError as error:
        facts.notes.append(f"{folder}/ can't be read: {error}")
    return found
