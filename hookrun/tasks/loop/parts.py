"""The model and the data of an experiment, for a user's own loop."""

from __future__ import annotations

import warnings

from torch import nn

from hookrun.errors import HookrunWarning, Problem, SpecError, listed
from hookrun.spec import Experiment, Spec
from hookrun.spec.experiment import RunWeights
from hookrun.tasks.base import task_of
from hookrun.tasks.loop.prepared import prepare_alone
from hookrun.tasks.loop.splits import ExperimentData
from hookrun.tasks.under_hooks import TaskUnderHooks
from hookrun.trust import read_once


def parts(experiment: Experiment, trust: frozenset[str]) -> tuple[nn.Module, ExperimentData]:
    """The model with its weights, on its device, and the data, which is not read yet.

    trust: names of the packages whose code the experiment may use

    Raises SpecError with all mistakes; also if the weights hold parameters that only hooks add.
    """
    named = experiment.settings.model.weights
    if isinstance(named, RunWeights) and experiment.runs.get(named.run, "") is None:
        what = f"it needs the run of {experiment.settings.needs[named.run]}, which has not been made"
        raise SpecError([Problem("model.weights.run", what, "run the experiment once on the command line")])
    task = task_of(experiment)
    split = task.first_split() if isinstance(task, TaskUnderHooks) else "train"
    with read_once(trust):
        built = prepare_alone(experiment, Spec(()), split, trust, tries=False)
    if built.leftover:
        names = listed(sorted(built.leftover), 8)
        text = f"the file holds {len(built.leftover)} tensors that the model does not have: {names}"
        hint = "parameters that hooks added can be loaded only in a run; use weights that were saved without them"
        raise SpecError([Problem("model.weights", text, hint)])
    again = [hook.name for hook in experiment.hooks.hooks if hook.identity in built.applied]
    if again:
        text = f"{listed(again, 8)} had changed the model before its weights were saved"
        warnings.warn(
            f"model.weights: {text}: installed again, they change it again", HookrunWarning, stacklevel=3
        )
    return built.model.to(built.device), ExperimentData(built.settings, built.data, built.device)
