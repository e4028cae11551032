"""What a command did: filled while it is carried out, for callers from Python and for `--json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookrun.run.experiment.task import Ready


@dataclass
class Outcome:
    """What one command did. An error that ends the command is raised; one that ended a run is kept here.

    run_dir:   the directory of a single run that was made, resumed or found done; None where there is none
    sweep_dir: the directory of a sweep that was launched or found done; None where there is none
    shown:     what was only printed, such as a plan, with the overrides of its job (empty for a single run)
    error:     why the single run ended without exit code 0, if an exception did that
    """

    run_dir: Path | None = None
    sweep_dir: Path | None = None
    shown: list[tuple[tuple[str, ...], Ready]] = field(default_factory=list)
    error: BaseException | None = None
