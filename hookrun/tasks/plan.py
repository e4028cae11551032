"""task=plan: show what the hooks would do in the experiment's own task, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hookrun.tasks.train import TrainTask


class PlanTask(TrainTask):
    """Shows the plan of the experiment's own task; of a training where the experiment has no other task than this."""

    task_name: ClassVar[str] = "plan"
    shows: ClassVar[bool] = True
    takes_place: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {}
