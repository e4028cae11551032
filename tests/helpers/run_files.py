"""Files of finished runs, and finished runs that hold given captures, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from hookrun.store.reader import Run, open_run
from hookrun.store.run_dir import RunDir
from hookrun.store.verify import verify


def weights(run: Run, name: str = "last") -> dict[str, Tensor]:
    """The tensors of a checkpoint."""
    return load_file(run.path / f"checkpoints/{name}.safetensors")


def recorded(run: Run) -> dict[str, Any]:
    """Everything that a reader finds in a run, except times."""
    assert verify(run.path).bad == []
    predicted = run.predictions
    files = {path.name: path.read_text() for path in [*run.path.glob("*.jsonl"), run.path / "hooks.json"]}
    checkpoints = sorted((run.path / "checkpoints").rglob("*.safetensors"))
    captures = dict[tuple[str, str], list[Any]]()
    for hook, modules in run.captures.items():
        for module, rows in modules.items():
            captures[hook, module] = columns_of(rows)
    names = {each.name for each in run.path.iterdir()}
    return {
        "rows": captures,
        "predictions": None if predicted is None else columns_of(predicted),
        "files": files,
        "weights": {path.name: path.read_bytes() for path in checkpoints},
        "attributions": {name: tensor.tolist() for name, tensor in run.attributions.items()},
        "status": run.status["status"],
        "exit_code": run.status["exit_code"],
        "left": sorted(names - {"report.html"}),
    }


def columns_of(rows: Any) -> list[Any]:
    """The values of a capture, and where they come from."""
    columns = (rows.sample_ids, rows.epochs, rows.steps, rows.calls)
    return [rows[:].numpy().tobytes(), rows.splits, *(column.tolist() for column in columns)]


def written(path: Path, *batches: Mapping[str, Tensor], split: Any = "val", by_sample: bool = True) -> Run:
    """A run whose hook `seen` captured these rows of modules, batch by batch; of samples from 0 on, or of none."""
    run = RunDir.create(path)
    first = 0
    for step, batch in enumerate(batches):
        for module, rows in batch.items():
            ids = range(first, first + len(rows)) if by_sample else None
            run.captures.add("seen", module, rows, epoch=0, step=step, call=0, split=split, sample_ids=ids)
        first += len(rows)
    run.close()
    run.set_status("done")
    return open_run(path)


def numbers_of(run: Run) -> dict[str, Any]:
    """What a run has written, in a form in which numbers can be compared up to rounding."""
    captures = dict[str, Any]()
    for hook, modules in run.captures.items():
        stored: Any
        for module, stored in modules.items():
            captures[f"{hook}/{module}"] = stored[:], stored.sample_ids, stored.steps, stored.calls
    lines = dict[str, list[Any]]()
    for path in sorted(run.path.glob("*.jsonl")):
        lines[path.name] = [json.loads(line) for line in path.read_text().splitlines()]
    predicted: Any = run.predictions
    return {
        "captures": captures,
        "lines": lines,
        "predictions": None if predicted is None else predicted[:],
        "attributions": dict(run.attributions),
        "weights": weights(run) if (run.path / "checkpoints/last.safetensors").exists() else {},
        "status": run.status["status"],
    }
