"""Files of finished runs."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from hookrun.store.reader import Run
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
    return {
        "rows": {
            (hook, module): columns_of(rows)
            for hook, modules in run.captures.items()
            for module, rows in modules.items()
        },
        "predictions": None if predicted is None else columns_of(predicted),
        "files": files,
        "weights": {path.name: path.read_bytes() for path in checkpoints},
        "attributions": {name: tensor.tolist() for name, tensor in run.attributions.items()},
        "status": {key: run.status[key] for key in ("status", "exit_code")},
        "left": sorted(each.name for each in run.path.iterdir() if each.name != "report.html"),
    }


def columns_of(rows: Any) -> list[Any]:
    """The values of a capture, and where they come from."""
    columns = (rows.sample_ids, rows.epochs, rows.steps, rows.calls)
    return [rows[:].numpy().tobytes(), rows.splits, *(column.tolist() for column in columns)]
