"""What a command did: filled while it is carried out, for callers from Python and for `--json`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookrun.errors import HookrunError, spec_error

if TYPE_CHECKING:
    from hookrun.run.experiment.task import Ready, Task


@dataclass
class Outcome:
    """What one command did.

    run_dir:   the directory of a single run that was made, resumed or found done; None where there is none
    stopped:   what the run is called if its task ends it early, with a reason
    sweep_dir: the directory of a sweep that was launched or found done; None where there is none
    errors:    why the command, or the single run that it made, ended without exit code 0, if exceptions did that
    told:      what else the object of `--json` says, such as a plan

    from_python: whether a function of Python gives the command, and not a command line: it raises the error of a run,
                 which is not printed, and what only prints is refused
    """

    run_dir: Path | None = None
    stopped: str = ""
    sweep_dir: Path | None = None
    errors: list[BaseException] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    from_python: bool = False

    def show(self, overrides: Sequence[str], ready: Ready) -> None:
        """Called when a plan or the like was shown for a job with these overrides; a single run has none."""

    def tell(self, error: HookrunError) -> None:
        """Print why the command, or a part of it, failed, and keep it."""
        print(error, file=sys.stderr)
        self.errors.append(error)

    def refuse_showing(self, task: type[Task]) -> None:
        """Raise SpecError for a task that only prints, where Python wants a run."""
        if self.from_python:
            typed = f"task={task.task_name}"
            hint = task.in_python or f"on the command line: hookrun {typed}"
            raise spec_error("task", f"{typed} only prints, and makes no run that could be opened", hint)
