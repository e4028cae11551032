"""The Weights & Biases logger: into the run directory, and to a server if the user has set it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hookrun.run.passes.loggers import LoggedRun, RunLogger, histogram_of, place_of, tag, unless_set

if TYPE_CHECKING:
    from hookrun.store.records import Of

PROJECT = "hookrun"
MOST_BINS = 512
"""The largest number of bins that wandb takes; histograms with more are left out."""


class WeightsAndBiases(RunLogger):
    """Logs through `wandb`, offline unless WANDB_MODE is set: an experiment file alone never sends data.

    ``wandb sync RUN/wandb/offline-run-…`` uploads it later. The project is WANDB_PROJECT, or `hookrun` by default.
    """

    logger_name: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"

    def __init__(self, run: LoggedRun) -> None:
        with unless_set(WANDB_ERROR_REPORTING="false"):
            import wandb

        settings = wandb.Settings(
            console="off",  # otherwise wandb captures stdout
            silent=True,
            symlink=False,
            save_code=False,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,  # host, user and command line
            x_disable_machine_info=True,
            x_disable_stats=True,
        )
        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self._run: Any = wandb.init(
            dir=str(run.path),
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            config=dict(run.config),
            mode=mode,
            reinit="create_new",  # runs of the user and of other jobs stay open
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def metrics(self, split: str, values: Mapping[str, float], step: int, of: Of | None = None) -> None:
        self._run.log({**{tag(split, name, of): value for name, value in values.items()}, "step": step})

    def record(self, record: dict[str, Any]) -> None:
        """Log the histogram and the counts in a line of stats.jsonl as histograms; its other values are not logged."""
        for name, value in record.items():
            found = histogram_of(name, value)
            if found is not None and len(found[0]) <= MOST_BINS:
                import wandb

                histogram: Any = wandb.Histogram
                place = place_of(record["hook"], record["module"], record["path"])
                step = record["step"] + (self.reached if record["mode"] == "eval" else 0)
                self._run.log(
                    {f"{place}/{name}/{record['mode']}": histogram(np_histogram=found), "step": step}
                )

    def close(self, *, failed: bool) -> None:
        folder = Path(self._run.dir).parent
        self._run.finish(exit_code=1 if failed else 0)
        for path in [each for each in folder.rglob("*") if each.is_symlink()]:
            path.unlink()  # links to wandb's own log: a run directory holds no links
