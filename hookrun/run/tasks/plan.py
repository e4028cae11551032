"""task=plan: prints what the hooks would do in the experiment's own task, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hookrun.run.tasks.train import TrainTask


class PlanTask(TrainTask):
    """Shows the plan of the experiment's own task; if the experiment names no other task, the plan of a training."""

    task_name: ClassVar[str] = "plan"
    shows: ClassVar[bool] = True
    takes_place: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {}
