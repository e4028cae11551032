"""What a run directory holds, as far as it holds it: a run that failed early, or goes on, has less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hookrun.errors import HookrunError
from hookrun.report.lines import Records, sampled
from hookrun.store.files import StoreError, os_reason, read_json
from hookrun.store.format import METRICS, STATS, STATUS
from hookrun.store.inside import open_inside
from hookrun.store.reader import Run, open_run
from hookrun.store.records import MOST_NAME, STATS_LINE
from hookrun.store.run_dir import cut_off

T = TypeVar("T")

MOST_CHECKS = 10_000
MOST_TEXT = 200_000
"""Characters of a file of text."""

GRADIENT_HOOKS = frozenset(
    {"backward_pre", "backward", "output_grad", "grad", "post_accumulate_grad", "optimizer_step_pre"}
)


@dataclass
class Facts:
    """A run as its directory tells it. What cannot be read is missing and noted: there is always a page.

    cut_off: why it seems that the run was cut off, or ``""``
    notes:   what to know of the page
    """

    path: Path
    run: Run
    status: dict[str, Any]
    plan: dict[str, Any]
    model: dict[str, Any]
    hooks: dict[str, Any]
    env: dict[str, Any]
    config: dict[str, Any]
    metrics: Records
    stats: Records
    cut_off: str = ""
    notes: list[str] = field(default_factory=list)

    @cached_property
    def planned(self) -> dict[str, dict[str, Any]]:
        """Hook name -> the hook, in firing order."""
        return {hook["name"]: hook for hook in self.plan.get("hooks", [])}

    @cached_property
    def order(self) -> dict[str, int]:
        """Hook name -> its place in firing order."""
        return {name: place for place, name in enumerate(self.planned)}

    def places(self, hook: str) -> dict[str, int]:
        """Module or parameter -> its place among those that a hook matched, in the model's order."""
        targets = self.planned.get(hook, {}).get("targets", [])
        return {target["path"]: place for place, target in enumerate(targets)}

    @cached_property
    def sites(self) -> dict[tuple[str, str], dict[str, Any]]:
        """(hook, module) -> its counts."""
        return {(site["hook"], site["module"]): site for site in self.hooks.get("sites", [])}

    @cached_property
    def classes(self) -> dict[str, str]:
        """Module path -> class."""
        return {module["path"]: module["class"] for module in self.model.get("modules", [])}

    @property
    def task(self) -> str:
        """The name of the task."""
        task = self.config.get("task")
        return str(task.get("name", "run")) if isinstance(task, dict) else "run"

    def text(self, name: str) -> str:
        """The content of a file of text; ``""`` where there is none."""
        path = self.path / name
        try:
            with open_inside(path, self.path) as file:
                content = file.read(4 * MOST_TEXT + 1).decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            self.notes.append(f"{name} can't be read: {os_reason(error)}")
            return ""
        return content if len(content) <= MOST_TEXT else content[:MOST_TEXT] + "\n… (cut off here)"


def read_facts(path: Path) -> Facts:
    """Read all but captures. Raises StoreError where there is no run."""
    run = open_run(path)
    notes = list[str]()
    status = _status(run, notes)

    def tried(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except HookrunError as error:  # a page with a gap is better than none
            notes.append(f"{what} can't be read: {error}")
            return otherwise

    facts = Facts(
        path=run.path,
        run=run,
        status=status,
        plan=tried("the plan", lambda: _plan(run.plan), {}),
        model=tried("the model's tree", lambda: _listing(run.model, "modules", _MODULE), {}),
        hooks=tried("the hooks' counts", lambda: _listing(run.hooks, "sites", _SITE), {}),
        env=tried("the environment", lambda: _entry(run.env), {}),
        config=tried("the configuration", lambda: run.config, {}),
        metrics=tried("the metrics", lambda: sampled(run.path / METRICS, _is_validation), Records()),
        stats=tried(
            "the records",
            lambda: sampled(run.path / STATS, _FirstChecks(), keys=_RECORD, line_of=STATS_LINE),
            Records(),
        ),
    )
    facts.cut_off = tried("the state of the run", lambda: cut_off(status), "")
    facts.notes += [*notes, *facts.metrics.notes, *facts.stats.notes]
    return facts


def _status(run: Run, notes: list[str]) -> dict[str, Any]:
    """The status; only its one word, and a note, where the rest is not as it should be. StoreError without that."""
    try:
        return run.status
    except StoreError as error:
        try:
            status = read_json(run.path / STATUS)
        except StoreError:
            raise error from None
        if not isinstance(status, dict) or not isinstance(status.get("status"), str):
            raise StoreError(f"{run.path / STATUS} says no status") from error
        notes.append(f"the status can't be read: {error}")
        return {"status": status["status"][:MOST_NAME]}


def _is_validation(line: bytes) -> bool:
    return b'"split": "train"' not in line


_MODULE = ("path", "names", "class", "parameters")
_SITE = ("hook", "module", "fired", "changed", "total")
_HOOK = ("name", "hook", "action", "params", "when")
_TARGET = ("path", "class", "shape")
_RECORD = {"hook": str, "module": str, "action": str, "mode": str, "epoch": int, "step": int}


def _entry(value: Any, *keys: str) -> dict[str, Any]:
    """The value, a mapping with these keys; else StoreError."""
    if not isinstance(value, dict):
        raise StoreError(f"found a {type(value).__name__}, expected a mapping")
    if missing := [key for key in keys if key not in value]:
        raise StoreError(f"it has no {', '.join(missing)}")
    return value


def _listing(value: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """A mapping with a list of entries, each with these keys."""
    for entry in _entry(value).get(name, []):
        _entry(entry, *keys)
    return _entry(value)


def _plan(plan: Any) -> dict[str, Any]:
    for hook in _listing(plan, "hooks", _HOOK).get("hooks", []):
        _entry(hook, "targets")
        _listing(hook, "targets", _TARGET)
    return _entry(plan)


class _FirstChecks:
    """The first line that a check left at each module: a line begins with hook, module and path."""

    def __init__(self) -> None:
        self._seen = set[bytes]()

    def __call__(self, line: bytes) -> bool:
        site, action, _ = line.partition(b'"action": "check"')
        if not action or site in self._seen or len(self._seen) >= MOST_CHECKS:
            return False
        self._seen.add(site)
        return True
