"""The runs that values and weights name: by directory, as one of the experiment's `needs`, or as `previous`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from hookrun.errors import HookrunError, Problem, SpecError, listed, nearest
from hookrun.spec import Experiment, Spec
from hookrun.spec.experiment import PREVIOUS, RunWeights, runs_of
from hookrun.store.files import StoreError
from hookrun.store.format import CHECKPOINTS
from hookrun.store.outputs import newest_finished, outputs_folder
from hookrun.store.reader import Run, open_run


class FoundRuns:
    """Finds each named run once, because a link such as `outputs/latest` may change at any time.

    known: name -> the run's directory, for names that are not paths; None: the run does not exist yet
    """

    def __init__(self, known: Mapping[str, str | None] | None = None) -> None:
        self._known = known or {}
        self._opened = dict[str, Run]()

    def open(self, name: str) -> Run | None:
        """The run, or None if it does not exist yet. Raises HookrunError if there is no such run."""
        if name in self._known and self._known[name] is None:
            return None
        if name not in self._opened:
            self._opened[name] = self._open(name)
        return self._opened[name]

    def _open(self, name: str) -> Run:
        if (place := self._known.get(name)) is not None:
            return open_run(place)
        if name == PREVIOUS:
            return open_run(newest_finished(outputs_folder()))
        try:
            return open_run(name)
        except StoreError as error:
            needs = [each for each in self._known if each != PREVIOUS]
            if not needs:
                raise
            raise StoreError(f"{error}; among the needs: {nearest(name, needs)}") from error

    def is_path(self, name: str) -> bool:
        """Whether the name is that of a directory."""
        return name not in self._known and name != PREVIOUS


@dataclass(frozen=True)
class UsedRun:
    """A run that values come from.

    where:    the key path that names it
    run:      the name given there
    path:     its directory, links resolved
    need:     it is one of the experiment's `needs`
    plan:     the hash of its plan; None if it had none
    manifest: the SHA-256 of its manifest; None if it did not finish
    """

    where: str
    run: str
    path: str
    need: bool
    plan: str | None
    manifest: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def used_run(where: str, name: str, runs: FoundRuns) -> UsedRun | None:
    """The run that the key `where` names; None if it does not exist yet."""
    run = runs.open(name)
    if run is None:
        return None
    need = not runs.is_path(name) and name != PREVIOUS
    return UsedRun(where, name, str(run.path), need, run.plan.get("hash"), run.status.get("manifest"))


def used_runs(spec: Spec, runs: FoundRuns) -> tuple[UsedRun, ...]:
    """The runs that values of the enabled hooks come from; missing runs are left out."""
    found = list[UsedRun]()
    for hook in spec.hooks:
        for where, value in hook.run_values() if hook.keys.enabled else ():
            with suppress(StoreError):  # that there is no such run is among the problems of its hook
                used = used_run(f"{where}.run", value.run, runs)
                found += [used] if used is not None else []
    return tuple(found)


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
