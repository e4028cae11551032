"""`model.weights: {run: NAME}`: the weights that another run has trained."""

from __future__ import annotations

from dataclasses import replace

from hookrun.errors import HookrunError, Problem, SpecError, listed
from hookrun.run_values.runs import FoundRuns, UsedRun, used_run
from hookrun.spec import Experiment
from hookrun.spec.experiment import RunWeights, runs_of
from hookrun.store.format import CHECKPOINTS
from hookrun.store.reader import Run

WHERE = "model.weights"
_SUFFIX = ".safetensors"


def with_found_weights(experiment: Experiment) -> Experiment:
    """The experiment with a checkpoint file for the run in `model.weights`, or without weights if that runs first.

    Raises SpecError if there is no such run, or it has no such checkpoint.
    """
    named = experiment.settings.model.weights
    if not isinstance(named, RunWeights):
        return experiment
    try:
        run = FoundRuns(experiment.runs).open(named.run)
    except HookrunError as error:
        raise SpecError([Problem(f"{WHERE}.run", str(error))]) from error
    path = None if run is None else _checkpoint(run, named)
    note = () if run is not None else (f"{WHERE}: those of {named.run}, which runs first",)
    model = experiment.settings.model.model_copy(update={"weights": path})
    return replace(
        experiment,
        settings=experiment.settings.model_copy(update={"model": model}),
        notes=(*experiment.notes, *note),
        takes={**experiment.takes, f"{WHERE}.run": named.run},
    )


def _checkpoint(run: Run, named: RunWeights) -> str:
    folder = run.path / CHECKPOINTS
    path = folder / f"{named.checkpoint}{_SUFFIX}"
    if path.is_file():
        return str(path)
    there = sorted(file.stem for file in folder.glob(f"*{_SUFFIX}"))
    what = f"the run {run.path} kept no checkpoint {named.checkpoint!r}; it has {listed(there, 6) or 'none'}"
    raise SpecError([Problem(f"{WHERE}.checkpoint", what, "a run keeps what its train.checkpoint.save says")])


def other_runs(experiment: Experiment) -> tuple[UsedRun, ...]:
    """The runs that the experiment uses outside the values of its hooks (`model.weights`, `task.metrics`).

    Raises HookrunError if a run does not exist.
    """
    named, runs = {**experiment.takes, **runs_of(experiment.settings)}, FoundRuns(experiment.runs)
    found = [used_run(where, name, runs) for where, name in named.items()]
    return tuple(each for each in found if each is not None)
