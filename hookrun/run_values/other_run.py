"""The run that uses values of other runs: what must be equal in both, and notes on other differences."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from hookrun.actions.values import OutsideValue, RunValue
from hookrun.data.info import SPLITS, Split
from hookrun.data.tokens import PaddingArgs
from hookrun.errors import HookrunError, Problem
from hookrun.run_values.runs import RunReferences
from hookrun.spec import HookSpec, Settings, Spec
from hookrun.store.captures.read import StoredCapture
from hookrun.store.files import StoreError
from hookrun.store.reader import Run

_MOST_SHOWN = 500


def require_same_split(capture: StoredCapture, named: str, split: Split) -> None:
    """Raises HookrunError if the capture is of another split, since sample ids match only within one split.

    named: the capture, for the message
    """
    theirs = sorted({SPLITS[part] for part in capture.splits.unique().tolist() if part >= 0})
    if theirs and split not in theirs:
        what = f"its samples are of the split {' and '.join(map(repr, theirs))}, these of {split!r}"
        raise HookrunError(f"{named} has other samples: {what}")


def require_same_model(run: Run, named: str, settings: Settings) -> None:
    """Raises HookrunError if the run is of another model.

    named: what is taken from it, for the message
    """
    theirs, ours = _section(run, "model"), settings.model.model_dump(mode="json")
    for key in ("name", "factory"):
        if theirs and theirs.get(key) != ours[key]:
            what = f"model.{key} is {_shown(theirs.get(key))} there and {ours[key]!r} here"
            raise HookrunError(f"{named} is of another model: {what}")


def padded_otherwise(value: object, runs: RunReferences) -> str | None:
    """Why tokens of this run are at other positions in the captures of other runs (different padding), or None."""
    minus = value.minus if isinstance(value, OutsideValue) else None
    if minus is not None and (why := padded_otherwise(minus, runs)) is not None:
        return why
    if not isinstance(value, RunValue) or runs.settings is None:
        return None
    run = runs.open(value.run)
    theirs = None if run is None else _section(run, "data").get("args")
    if not isinstance(theirs, dict):
        return None
    there, here = theirs.get("padding", _PADDED), runs.settings.data.args.get("padding", _PADDED)
    if there == here:
        return None
    return (
        f"{value}: data.args.padding is {_shown(there)} there and {here!r} here, so that a token is at "
        "another position in the captured rows"
    )


_PADDED = PaddingArgs.model_fields["padding"].default

_MAY_DIFFER = {"model": ("args", "weights"), "data": ("name", "root", "args", "transforms")}


def differences(spec: Spec, settings: Settings, runs: RunReferences) -> tuple[str, ...]:
    """A note on each run that values of `spec` come from, if it differs from this run in weights, data or seed."""
    notes = list[str]()
    for name in dict.fromkeys(name for hook in spec.hooks for name in _runs(hook)):
        with suppress(StoreError):  # a missing run is reported as a problem of its hook
            run = runs.open(name)
            if run is None:
                text = f"{name} runs first: what it captures, and whether it fits, is not known before"
                notes.append(text)
            elif differing := _differences(run, settings):
                notes.append(f"values come from {name}, where {'; '.join(differing)}")
    return tuple(notes)


def _differences(run: Run, settings: Settings) -> list[str]:
    found = list[str]()
    for section, keys in _MAY_DIFFER.items():
        theirs, ours = _section(run, section), getattr(settings, section).model_dump(mode="json")
        if isinstance(theirs.get("weights"), dict):  # the weights of a run, given by its file
            theirs = {**theirs, "weights": run.model.get("weights")}
        found += [
            f"{section}.{key} is {_shown(theirs.get(key))} there and {ours[key]!r} here"
            for key in keys
            if theirs and theirs.get(key) != ours[key]
        ]
    seed = run.config.get("seed", settings.seed)
    if seed != settings.seed and settings.model.weights is None:
        found.append(
            f"seed is {_shown(seed)} there and {settings.seed} here, from which the weights are drawn"
        )
    return found


def _shown(value: Any) -> str:
    """A value of another run's configuration, shortened."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _section(run: Run, name: str) -> dict[str, Any]:
    section = run.config.get(name)
    return section if isinstance(section, dict) else {}


def with_origins(problems: list[Problem], spec: Spec, runs: RunReferences) -> list[Problem]:
    """The problems; if the hook takes values from another run, the problem names the plan of that run."""
    origins = {
        hook.where: origin
        for hook in spec.hooks
        if (origin := "; ".join(filter(None, (_origin(name, runs) for name in _runs(hook)))))
    }
    return [
        replace(each, hint="; ".join(filter(None, [each.hint, origins.get(_hook_of(each.where), "")])))
        for each in problems
    ]


def _runs(hook: HookSpec) -> list[str]:
    """The runs that the hook takes values from, as written in the file."""
    return list(dict.fromkeys(value.run for _, value in hook.run_values()))


def _origin(name: str, runs: RunReferences) -> str:
    try:
        run = runs.open(name)
        plan = {} if run is None else run.plan
    except HookrunError:  # that there is no such run is a problem of its own
        return ""
    if run is None:
        return ""
    model = f"of a {plan.get('model')}, hash {str(plan.get('hash'))[:12]}" if plan else "unknown"
    matches = [match for each in plan.get("hooks", []) for match in each.get("targets", [])]
    shapes = ", ".join(f"{match['path']} {match.get('shape')}" for match in matches[:6])
    return f"the run {name} has the plan {model}: {shapes}"


def _hook_of(where: str) -> str:
    return ".".join(where.split(".")[:2])
