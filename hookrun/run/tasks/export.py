"""task=export: the model with its hooks as an exported program, which runs without hookrun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hookrun.errors import HookrunError, Problem
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task import changed
from hookrun.run.tasks.under_hooks import TaskOfOneSplit
from hookrun.store.objective import Direction

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.nn import Module

    from hookrun.engine.plan.plan import ResolvedPlan
    from hookrun.run.passes.context import RunContext

PROGRAM = "exported.pt2"


class ExportTask(TaskOfOneSplit):
    """Writes exported.pt2, and compares it with the hooked model on a batch of the split."""

    task_name: ClassVar[str] = "export"
    takes_apart: ClassVar[bool] = True

    def unused(self, experiment: Experiment) -> list[str]:
        """The unused settings, with `compute.compile` and `compute.precision`: the model is exported as it is."""
        compute = experiment.settings.compute
        used = set(type(compute).model_fields) - {"compile", "precision"}
        return [*super().unused(experiment), *changed("compute", compute, but=used)]

    def plan_problems(self, plan: ResolvedPlan, settings: Settings) -> list[Problem]:
        """A problem for each hook that torch.export cannot export."""
        from hookrun.engine.plan.plan import unexportable

        return unexportable(plan)

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The relative difference between the outputs of the program and the model."""
        return {f"{self.split}/difference": "minimize"}

    def perform(self, context: RunContext) -> None:
        """Export the model and compare the outputs of the program and the model.

        Raises HookrunError if torch.export cannot read the model, or if the outputs differ.
        """
        import torch

        from hookrun.run.experiment.prepared import as_call
        from hookrun.run.passes.batches import Batches
        from hookrun.run.passes.compile_check import TOLERANCE, relative_difference

        with context.evaluating(Batches(context.prepared, self.split), self.name) as (passed, _):
            batch = next(iter(passed))
            args, kwargs = as_call(batch.inputs, context.model)
            with torch.no_grad():
                expected = context.model(*args, **kwargs)
                with context.hooks.uncounted():
                    program = _exported(context.model, args, kwargs)
                found = program.module()(*args, **kwargs)
        path = context.run_dir.path / PROGRAM
        torch.export.save(program, path)
        context.run_dir.wrote(path)
        samples, difference = len(batch.ids), relative_difference(found, expected)
        context.conclude(self.split, {"samples": samples, "difference": difference})
        if difference > TOLERANCE:
            raise HookrunError(
                f"the exported program's output differs from the hooked model's by {difference:.2g} of its norm"
            )
        context.screen.say(
            f"exported to {path}; its output agrees with the hooked model on {samples} samples"
        )


def _exported(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    import torch

    any_batch = {0: torch.export.Dim.AUTO}
    shapes = {name: any_batch for name in kwargs} if kwargs else tuple(any_batch for _ in args)
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:  # torch raises many types here, all of them about the model
        first = str(error).strip().splitlines()[0]
        raise HookrunError(f"torch.export cannot read the model: {type(error).__name__}: {first}") from error
