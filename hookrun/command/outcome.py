"""What a command did: filled while it is carried out, for callers from Python and for `--json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hookrun.errors import spec_error

if TYPE_CHECKING:
    from hookrun.run.experiment.task import Ready


@dataclass
class Outcome:
    """What one command did. An error that ends the command is raised; one that ended a run is kept here.

    run_dir:   the directory of a single run that was made, resumed or found done; None where there is none
    sweep_dir: the directory of a sweep that was launched or found done; None where there is none
    shown:     what was only printed, such as a plan, with the overrides of its job (empty for a single run)
    error:     why the single run ended without exit code 0, if an exception did that

    from_python: whether a function of Python gives the command, and not a command line: it raises `error`, which is not
                 printed, and what only prints is refused
    """

    run_dir: Path | None = None
    sweep_dir: Path | None = None
    shown: list[tuple[tuple[str, ...], Ready]] = field(default_factory=list)
    error: BaseException | None = None
    from_python: bool = False

    def refuse_showing(self, task: str) -> None:
        """Raise SpecError for a task that only prints, where Python wants a run."""
        if self.from_python:
            hint = _IN_PYTHON.get(task, f"on the command line: hookrun task={task}")
            raise spec_error("task", f"task={task} only prints, and makes no run that could be opened", hint)


_IN_PYTHON = {
    "modules": "hookrun.modules(model) gives them",
    "plan": "hookrun.compile(hookrun.load_spec(experiment=NAME), model) gives the plan",
}
"""Task -> what gives in Python what it prints."""
