"""Run directories with records that a test writes by hand, and the curves that their pages show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hookrun.report import write_report
from hookrun.store.format import encode
from hookrun.store.run_dir import RunDir


def record(hook: str, module: str, step: int, action: str = "stats", **values: Any) -> dict[str, Any]:
    """A line of stats.jsonl."""
    start = {"hook": hook, "module": module, "path": "", "action": action, "mode": "train", "epoch": 0}
    return {**start, "step": step, "call": 0, **values}


def planned(
    name: str, modules: Iterable[str], hook: str = "forward", action: str = "stats", **params: Any
) -> dict[str, Any]:
    """A hook of plan.json."""
    targets = [{"path": module, "class": "Linear"} for module in modules]
    return {"name": name, "hook": hook, "action": action, "params": params, "targets": targets}


def made_run(
    path: Path,
    records: Iterable[Mapping[str, Any]],
    hooks: Sequence[Mapping[str, Any]] = (),
    losses: Sequence[float] = (),
) -> Path:
    """A run directory that is done, with these lines of stats.jsonl, hooks and losses of training batches."""
    run = RunDir.create(path)
    for step, loss in enumerate(losses):
        run.log_metrics(split="train", of="batch", epoch=0, step=step, loss=loss)
    run.close()
    (path / "plan.json").write_text(json.dumps({"hooks": hooks}))
    (path / "stats.jsonl").write_text("".join(f"{encode(line)}\n" for line in records))
    run.set_status("done")
    return path


@dataclass
class Shown(HTMLParser):
    """A page: its curves outside and inside of what is folded, and its tags."""

    source: str
    open_curves: int = 0
    folded_curves: int = 0
    tags: list[str] = field(default_factory=list)
    _folds: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "details":
            self._folds.append(("open", None) not in attrs and ("open", "") not in attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "path" and (dict(attrs).get("class") or "").startswith("line"):
            is_folded = any(self._folds)
            self.folded_curves += is_folded
            self.open_curves += not is_folded

    def handle_endtag(self, tag: str) -> None:
        if tag == "details":
            self._folds.pop()


def shown(path: Path) -> Shown:
    """The page of a run, made again."""
    return Shown(write_report(path).read_text(encoding="utf-8"))
