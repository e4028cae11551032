"""task=plan: prints what the hooks would do in the experiment's own task, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hookrun.run.tasks.train import TrainTask


class PlanTask(TrainTask):
    """Shows the plan of a training.

    Typed as ``task=plan`` it is a word of the command, which shows the plan of the experiment's own task; this task is
    for an experiment whose own task runs without hooks, or that chooses it in its defaults list.
    """

    task_name: ClassVar[str] = "plan"
    shows: ClassVar[bool] = True
    in_python: ClassVar[str] = "hookrun.compile(hookrun.load_spec(experiment=NAME), model) gives the plan"
    refuses: ClassVar[Mapping[str, str]] = {}
