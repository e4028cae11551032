"""References to other runs, which values and weights name: a directory, one of the experiment's `needs`, `previous`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hookrun.data.info import DataInfo, Split
from hookrun.errors import HookrunError, Problem, SpecError, listed, nearest
from hookrun.spec import Experiment, Settings, Spec
from hookrun.spec.experiment import PREVIOUS, RunWeights, runs_of
from hookrun.store.files import StoreError
from hookrun.store.format import CHECKPOINTS
from hookrun.store.outputs import newest_finished, outputs_folder
from hookrun.store.reader import Run, open_run
from hookrun.store.records import UsedRunRecord


@dataclass(frozen=True)
class RunReferences:
    """The other runs that an experiment names, and what of the run that uses them is compared with theirs.

    A run is opened once, because a link such as `outputs/latest` may change at any time.

    known:    name -> the run's directory, for names that are not paths; None: the run does not exist yet
    settings: of the run that uses the others; None: a model of the user's own
    split:    the split of its samples; None: several, or not known without settings
    data:     the description of its data; None: not known, or the data of a user's own loop
    """

    known: Mapping[str, str | None] = field(default_factory=dict)
    settings: Settings | None = None
    split: Split | None = None
    data: DataInfo | None = None
    _opened: dict[str, Run] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, experiment: Experiment, split: Split | None = None, data: DataInfo | None = None
    ) -> RunReferences:
        """The runs that the experiment names."""
        return cls(experiment.runs, experiment.settings, split, data)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the data; None if it has none, or is not known."""
        return None if self.data is None else self.data.tokenizer

    def open(self, name: str) -> Run | None:
        """The run, or None if it does not exist yet. Raises HookrunError if there is no such run."""
        if name in self.known and self.known[name] is None:
            return None
        if name not in self._opened:
            self._opened[name] = self._open(name)
        return self._opened[name]

    def _open(self, name: str) -> Run:
        if (place := self.known.get(name)) is not None:
            return open_run(place)
        if name == PREVIOUS:
            return open_run(newest_finished(outputs_folder()))
        try:
            return open_run(name)
        except StoreError as error:
            needs = [need for need in self.known if need != PREVIOUS]
            if not needs:
                raise
            raise StoreError(f"{error}; among the needs: {nearest(name, needs)}") from error

    def used(self, where: str, name: str) -> UsedRunRecord | None:
        """The record of the run that the key `where` names; None if it does not exist yet."""
        run = self.open(name)
        if run is None:
            return None
        plan, manifest = run.plan.get("hash"), run.status.get("manifest")
        need = name in self.known and name != PREVIOUS
        return UsedRunRecord(
            where=where, run=name, path=str(run.path), need=need, plan=plan, manifest=manifest
        )


def used_runs(spec: Spec, runs: RunReferences) -> tuple[UsedRunRecord, ...]:
    """The runs that values of the enabled hooks come from; missing runs are left out."""
    records = list[UsedRunRecord]()
    for hook in spec.hooks:
        for where, value in hook.run_values() if hook.keys.enabled else ():
            with suppress(StoreError):  # that there is no such run is among the problems of its hook
                if (record := runs.used(f"{where}.run", value.run)) is not None:
                    records.append(record)
    return tuple(records)


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
        run = RunReferences.of(experiment).open(named.run)
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


def other_runs(experiment: Experiment) -> tuple[UsedRunRecord, ...]:
    """The runs that the experiment uses outside the values of its hooks (`model.weights`, `task.metrics`).

    Raises HookrunError if a run does not exist.
    """
    named, runs = {**experiment.takes, **runs_of(experiment.settings)}, RunReferences.of(experiment)
    records = [runs.used(where, name) for where, name in named.items()]
    return tuple(record for record in records if record is not None)
