"""What a run directory holds, as far as it holds it: a run that failed early, or goes on, has less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hookrun.errors import HookrunError
from hookrun.report.lines import Records, sampled
from hookrun.store.format import METRICS, STATS
from hookrun.store.reader import Run, open_run

T = TypeVar("T")

MOST_TEXT = 200_000
"""Characters of a file of text."""

GRADIENT_HOOKS = frozenset(
    {"backward_pre", "backward", "output_grad", "grad", "post_accumulate_grad", "optimizer_step_pre"}
)


@dataclass
class Facts:
    """A run as its directory tells it. What cannot be read is missing and noted: there is always a page.

    notes: what to know of the page
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
    notes: list[str] = field(default_factory=list)

    @cached_property
    def planned(self) -> dict[str, dict[str, Any]]:
        """Hook name -> the hook, in firing order."""
        return {hook["name"]: hook for hook in self.plan.get("hooks", [])}

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
        try:
            with (self.path / name).open(encoding="utf-8", errors="replace") as file:
                content = file.read(MOST_TEXT + 1)
        except FileNotFoundError:
            return ""
        except OSError as error:
            self.notes.append(f"{name} can't be read: {error.strerror or error}")
            return ""
        return content if len(content) <= MOST_TEXT else content[:MOST_TEXT] + "\n… (cut off here)"


def read_facts(path: Path) -> Facts:
    """Read all but captures. Raises StoreError where there is no run."""
    run = open_run(path)
    notes = list[str]()

    def tried(what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except Exception as error:  # YAML's and JSON's own errors too: a page with a gap is better than none
            said = str(error) if isinstance(error, HookrunError) else f"{type(error).__name__}: {error}"
            notes.append(f"{what} can't be read: {said}")
            return otherwise

    facts = Facts(
        path=run.path,
        run=run,
        status=run.status,
        plan=tried("the plan", lambda: run.plan, {}),
        model=tried("the model's tree", lambda: run.model, {}),
        hooks=tried("the hooks' counts", lambda: run.hooks, {}),
        env=tried("the environment", lambda: run.env, {}),
        config=tried("the configuration", lambda: run.config, {}),
        metrics=tried("the metrics", lambda: sampled(run.path / METRICS, _is_validation), Records()),
        stats=tried("the records", lambda: sampled(run.path / STATS, _CheckLines()), Records()),
    )
    cut_off = tried("the state of the run", lambda: run.cut_off, "")
    facts.notes += [cut_off] if cut_off else []
    facts.notes += [*notes, *facts.metrics.notes, *facts.stats.notes]
    return facts


def _is_validation(line: bytes) -> bool:
    return b'"split": "train"' not in line


class _CheckLines:
    """The first thousand lines that checks left."""

    def __init__(self) -> None:
        self._left = 1000

    def __call__(self, line: bytes) -> bool:
        hit = self._left > 0 and b'"action": "check"' in line
        self._left -= hit
        return hit
