"""task=export: the model with its hooks baked in, as a program that runs without hookrun."""

from __future__ import annotations

import torch
from torch.export import Dim, ExportedProgram

from hookrun.errors import HookrunError
from hookrun.tasks.loop.batches import Batch, Batches
from hookrun.tasks.loop.compiled import TOLERANCE, relative_difference
from hookrun.tasks.loop.running import Running
from hookrun.tasks.prepare import as_call

PROGRAM = "exported.pt2"


def export(running: Running) -> None:
    """Write the program, and compare it with the hooked model on a batch of `task.split`.

    Raises HookrunError where torch.export cannot read the model, or where the two differ.
    """
    split = running.settings.task.split
    with running.evaluating(Batches(running.prepared, split), "export") as (passed, _):
        batch = next(iter(passed))
        args, kwargs = as_call(batch.inputs)
        with torch.no_grad():
            expected = running.model(*args, **kwargs)
            with running.hooks.uncounted():
                program = _exported(running, batch)
            found = program.module()(*args, **kwargs)
    path = running.run_dir.path / PROGRAM
    torch.export.save(program, path)
    difference = relative_difference(found, expected)
    running.log(split, {"samples": len(batch.ids), "difference": difference})
    if difference > TOLERANCE:
        raise HookrunError(
            f"the exported program's output is off by {difference:.2g} of the hooked model's size"
        )
    running.screen.say(
        f"exported to {path}; it gives what the hooked model gives on {len(batch.ids)} samples"
    )


def _exported(running: Running, batch: Batch) -> ExportedProgram:
    args, kwargs = as_call(batch.inputs)
    any_batch = {0: Dim.AUTO}
    shapes = {name: any_batch for name in kwargs} if kwargs else tuple(any_batch for _ in args)
    try:
        return torch.export.export(running.model, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:  # torch has many kinds, all of them about the model
        first = str(error).strip().splitlines()[0]
        raise HookrunError(f"torch.export cannot read the model: {type(error).__name__}: {first}") from error
