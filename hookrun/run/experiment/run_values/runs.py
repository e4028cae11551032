"""References to other runs, which values and weights name: a directory, one of the experiment's `needs`, `previous`.

What must be equal in both runs, and notes on other differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from hookrun.data.info import SPLITS, DataInfo, Split
from hookrun.data.tokens import PaddingArgs
from hookrun.engine.actions.values import RunValue, parts_of
from hookrun.engine.spec import HookSpec, Spec
from hookrun.errors import HookrunError, Problem, listed, nearest, refused_at, shortened, spec_error
from hookrun.models.settings import RunWeights
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.settings import PREVIOUS, Settings, runs_of
from hookrun.store.captures.read import StoredCapture
from hookrun.store.files import StoreError
from hookrun.store.format import CHECKPOINTS
from hookrun.store.format import differences as unequal
from hookrun.store.reader import Run, open_run
from hookrun.store.records import UsedRunRecord
from hookrun.store.run_dir import newest_finished, outputs_folder


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
    def of(cls, experiment: Experiment, split: Split | None = None, data: DataInfo | None = None) -> Self:
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
        return UsedRunRecord(
            where=where,
            run=name,
            path=str(run.path),
            need=name in self.known and name != PREVIOUS,
            plan=run.plan.get("hash"),
            manifest=run.status.get("manifest"),
        )


def used_runs(spec: Spec, runs: RunReferences) -> tuple[UsedRunRecord, ...]:
    """The runs that values of the enabled hooks come from; missing runs are left out."""
    records: list[UsedRunRecord] = []
    for hook in spec.hooks:
        for where, value in hook.run_values() if hook.keys.enabled else ():
            with suppress(StoreError):  # that there is no such run is among the problems of its hook
                if (record := runs.used(f"{where}.run", value.run)) is not None:
                    records.append(record)
    return tuple(records)


_MOST_SHOWN = 500
WHERE = "model.weights"
_SUFFIX = ".safetensors"


def with_found_weights(experiment: Experiment) -> Experiment:
    """The experiment with a checkpoint file for the run in `model.weights`, or without weights if that runs first.

    Raises SpecError if there is no such run, or it has no such checkpoint.
    """
    named = experiment.settings.model.weights
    if not isinstance(named, RunWeights):
        return experiment
    with refused_at(f"{WHERE}.run"):
        run = RunReferences.of(experiment).open(named.run)
    path = None if run is None else _checkpoint(run, named)
    model = experiment.settings.model.model_copy(update={"weights": path})
    return replace(
        experiment,
        settings=experiment.settings.model_copy(update={"model": model}),
        takes={**experiment.takes, f"{WHERE}.run": named.run},
    )


def _checkpoint(run: Run, named: RunWeights) -> str:
    folder = run.path / CHECKPOINTS
    path = folder / f"{named.checkpoint}{_SUFFIX}"
    if path.is_file():
        return str(path)
    kept = sorted(file.stem for file in folder.glob(f"*{_SUFFIX}"))
    raise spec_error(
        f"{WHERE}.checkpoint",
        f"the run {run.path} kept no checkpoint {named.checkpoint!r}; it has {listed(kept, 6) or 'none'}",
        "a run keeps what its train.checkpoint.save says",
    )


def other_runs(experiment: Experiment) -> tuple[UsedRunRecord, ...]:
    """The runs that the experiment uses outside the values of its hooks (`model.weights`, `task.metrics`).

    Raises SpecError if a run does not exist.
    """
    runs = RunReferences.of(experiment)
    records: list[UsedRunRecord | None] = []
    for where, name in {**experiment.takes, **runs_of(experiment.settings)}.items():
        with refused_at(where):
            records.append(runs.used(where, name))
    return tuple(record for record in records if record is not None)


def require_same_split(capture: StoredCapture, named: str, split: Split) -> None:
    """Raises HookrunError if the capture is of another split, since sample ids match only within one split.

    named: the capture, for the message
    """
    theirs = sorted({SPLITS[part] for part in capture.split_numbers.unique().tolist() if part >= 0})
    if theirs and split not in theirs:
        raise HookrunError(
            f"{named} has other samples: its samples are of the split {' and '.join(map(repr, theirs))}, "
            f"these of {split!r}"
        )


def require_same_model(run: Run, named: str, settings: Settings) -> None:
    """Raises HookrunError if the run is of another model.

    named: what is taken from it, for the message
    """
    for difference in _unequal(run, settings, "model", ("name", "factory")):
        raise HookrunError(f"{named} is of another model: {difference}")


def padded_otherwise(value: object, runs: RunReferences) -> str | None:
    """Why tokens of this run are at other positions in the captures of other runs (different padding), or None."""
    if runs.settings is None:
        return None
    padding = runs.settings.data.args.get("padding", _PADDED)
    for part in parts_of(value):
        run = runs.open(part.run) if isinstance(part, RunValue) else None
        args = None if run is None else _section(run, "data").get("args")
        if not isinstance(args, dict):
            continue
        other = args.get("padding", _PADDED)
        if other != padding:
            return (
                f"{part}: data.args.padding is {_shown(other)} there and {padding!r} here, so that a token is at "
                "another position in the captured rows"
            )
    return None


_PADDED = PaddingArgs.model_fields["padding"].default

_MAY_DIFFER = {"model": ("args", "weights"), "data": ("name", "root", "args", "transforms")}


def differences(spec: Spec, settings: Settings, runs: RunReferences) -> tuple[str, ...]:
    """A note on each run that values of `spec` come from, if it differs from this run in weights, data or seed."""
    notes: list[str] = []
    names = [name for hook in spec.hooks for name in _runs(hook)]
    for name in dict.fromkeys(names):
        with suppress(StoreError):  # a missing run is reported as a problem of its hook
            run = runs.open(name)
            if run is None:
                notes.append(f"{name} runs first: what it captures, and whether it fits, is not known before")
            elif differing := _differences(run, settings):
                notes.append(f"values come from {name}, where {'; '.join(differing)}")
    return tuple(notes)


def _differences(run: Run, settings: Settings) -> list[str]:
    notes: list[str] = []
    for section, keys in _MAY_DIFFER.items():
        notes += _unequal(run, settings, section, keys)
    seed = run.config.get("seed", settings.seed)
    if seed != settings.seed and settings.model.weights is None:
        notes.append(
            f"seed is {_shown(seed)} there and {settings.seed} here, from which the weights are drawn"
        )
    return notes


def _unequal(run: Run, settings: Settings, section: str, keys: Sequence[str]) -> list[str]:
    """For each of these keys, or key below it, that has another value in that run: both values."""
    theirs = _section(run, section)
    if not theirs:
        return []
    ours = getattr(settings, section).model_dump(mode="json")
    if isinstance(theirs.get("weights"), dict):  # the weights of a run, given by its file
        theirs = theirs | {"weights": run.model.get("weights")}
    pairs = unequal({key: theirs.get(key) for key in keys}, {key: ours.get(key) for key in keys})
    return [
        f"{section}.{key} is {_shown(other)} there and {_shown(value)} here"
        for key, other, value in pairs
        if {} not in (other, value)  # without keys that the other one has
    ]


def _shown(value: Any) -> str:
    """A value of another run's configuration, shortened."""
    return shortened(repr(value), _MOST_SHOWN)


def _section(run: Run, name: str) -> dict[str, Any]:
    section = run.config.get(name)
    return section if isinstance(section, dict) else {}


def with_origins(problems: list[Problem], spec: Spec, runs: RunReferences) -> list[Problem]:
    """The problems; if the hook takes values from another run, the problem names the plan of that run."""
    origins: dict[str, list[str]] = {}
    for hook in spec.hooks:
        origins[hook.where] = [origin for name in _runs(hook) if (origin := _origin(name, runs))]
        if spec.bundle is not None and hook.name in spec.bundle.sites:
            made_for = (
                f"the model class {spec.bundle.model}, where the hook was on {spec.bundle.sites[hook.name]}"
            )
            origins[hook.where].append(f"the bundle {spec.bundle.path} was made for {made_for}")
    told: list[Problem] = []
    for problem in problems:
        hook_path = ".".join(problem.where.split(".")[:2])
        hints = [problem.hint] if problem.hint else []
        told.append(replace(problem, hint="; ".join(hints + origins.get(hook_path, []))))
    return told


def _runs(hook: HookSpec) -> list[str]:
    """The runs that the hook takes values from, as written in the file."""
    return list(dict.fromkeys(value.run for _, value in hook.run_values()))


def _origin(name: str, runs: RunReferences) -> str:
    with suppress(HookrunError):  # that there is no such run is a problem of its own
        run = runs.open(name)
        if run is not None:
            shapes: list[str] = []
            for hook in run.plan.get("hooks", []):
                shapes += [f"{match['path']} {match.get('shape')}" for match in hook.get("targets", [])]
            model = "unknown"
            if run.plan:
                model = f"of a {run.plan.get('model')}, hash {str(run.plan.get('hash'))[:12]}"
            return f"the run {name} has the plan {model}: {', '.join(shapes[:6])}"
    return ""
