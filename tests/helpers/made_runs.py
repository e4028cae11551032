"""Small run directories, written as a run writes them, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookrun.store.format import State
from hookrun.store.run_dir import RunDir

CLAMP = {
    "name": "clip_fc",
    "hook": "grad",
    "action": "clamp",
    "targets": [{"path": "fc.weight"}, {"path": "fc.bias"}],
}


def made_run(
    folder: Path,
    *typed: str,
    status: State = "done",
    started: str = "",
    hooks: Sequence[Mapping[str, Any]] = (CLAMP,),
    metrics: Sequence[Mapping[str, Any]] = (),
    **config: Any,
) -> Path:
    """A run that was started with the overrides `typed`.

    started: its time in status.json; by default now
    metrics: the lines of metrics.jsonl
    config:  its stored configuration
    """
    run = RunDir.create(folder)
    hydra = folder / ".hydra"
    hydra.mkdir()
    whole = {"task": {"name": "train"}, "model": {"name": "cnn"}, **config}
    (hydra / "config.yaml").write_text(json.dumps(whole), encoding="utf-8")
    (hydra / "overrides.yaml").write_text(json.dumps(typed), encoding="utf-8")
    run.set_status("running")
    run.write("plan.json", {"model": "CNN", "hooks": list(hooks)})
    for line in metrics:
        run.log_metrics(**line)
    run.close()
    if status != "running":
        run.write_manifest()
        run.set_status(status)
    if started:
        change(folder, started=started, ended=started)
    return folder


def change(folder: Path, **values: Any) -> None:
    """Change keys of status.json; None takes a key away."""
    path = folder / "status.json"
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
