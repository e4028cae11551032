"""The directories of the runs that an experiment names as a need, `latest` or `previous`; a run stores them."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hookrun.errors import Problem, SpecError
from hookrun.spec import Experiment
from hookrun.spec.experiment import PREVIOUS, Need
from hookrun.store.files import replacing
from hookrun.store.format import CONFIG

if TYPE_CHECKING:
    from hookrun.run_values import UsedRun
    from hookrun.tasks import Ready


@dataclass(frozen=True)
class KnownRuns:
    """The directories of the runs. It can be pickled, so that the jobs of a sweep find them in other processes.

    needs:    need -> the directory of its run; None: the need has not been run yet
    previous: the directory of the run before this one; None: it is looked up when an experiment refers to it
    """

    needs: Mapping[Need, str | None] = field(default_factory=dict)
    previous: str | None = None

    def of(self, experiment: Experiment) -> Experiment:
        """The experiment with the directories of its runs. Raises SpecError for a need that is not in `needs`."""
        runs = dict[str, str | None]()
        for name, need in experiment.settings.needs.items():
            if need not in self.needs:
                what = "was not known when the sweep began, and a job does not run its own needs"
                hint = "let the overrides of a need hold no key that the sweeper chooses as it goes"
                raise SpecError([Problem(f"needs.{name}", f"{need} {what}", hint)])
            runs[name] = self.needs[need]
        if self.previous is not None:
            runs[PREVIOUS] = self.previous
        return replace(experiment, runs=runs)


def keep_found_runs(run_dir: Path, cfg: DictConfig, prepared: Ready) -> None:
    """Rewrite the stored configuration with the directories that names such as `outputs/latest` stood for.

    cfg: the configuration of the run
    """
    runs: Sequence[UsedRun] = prepared.runs
    places = {run.where: run.path for run in runs if not run.need and os.path.abspath(run.run) != run.path}
    weights, found = prepared.settings.model.own_weights, getattr(prepared, "weights", "")
    if weights is not None and os.path.isabs(found) and os.path.abspath(Path(weights).expanduser()) != found:
        places["model.weights"] = found
    stored = run_dir / CONFIG
    if not places or not stored.is_file():
        return
    found = copy.deepcopy(cfg)
    with read_write(found), open_dict(found):
        for where, path in places.items():
            OmegaConf.update(found, where, path, force_add=True)
    with replacing(stored) as file:
        file.write(OmegaConf.to_yaml(found).encode())
