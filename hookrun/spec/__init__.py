"""From a plain mapping to a validated experiment: every mistake at once, each with its key path. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from hookrun.arguments import problems_of
from hookrun.errors import Problem, SpecError, nearest
from hookrun.spec.experiment import Settings, TaskKeys
from hookrun.spec.hook import HookSpec, Spec, parse_hooks
from hookrun.spec.limits import beyond_limits
from hookrun.spec.selector.base import shown
from hookrun.spec.task import parse_task

__all__ = ["Experiment", "HookSpec", "Settings", "Spec", "TaskKeys", "parse_experiment", "parse_spec"]


@dataclass(frozen=True)
class Experiment:
    """A whole experiment: its settings and its hooks.

    notes: what to know beside the plan
    runs:  name -> directory of each run of its `needs`, and of `previous`; None: the run is still to be made
    """

    settings: Settings
    hooks: Spec
    notes: tuple[str, ...] = ()
    runs: Mapping[str, str | None] = field(default_factory=dict)

    def of_a_sweep(self) -> Experiment:
        """The experiment as a job of a sweep, which keeps the best weights alone unless it says otherwise."""
        train = self.settings.train
        if train.checkpoint.save is not None:
            return self
        checkpoint = train.checkpoint.model_copy(update={"save": "best"})
        changed = {"train": train.model_copy(update={"checkpoint": checkpoint})}
        return replace(self, settings=self.settings.model_copy(update=changed))


def parse_experiment(config: Mapping[str, Any], tasks: Mapping[str, type[TaskKeys]]) -> Experiment:
    """Validate the root mapping of a composed configuration.

    tasks: every task by name

    Raises SpecError with every mistake in it.
    """
    _refuse_beyond_limits(config)
    problems = [_unknown_root(key) for key in config if key not in ROOT_KEYS]
    task, notes, wrong_in_task = parse_task(config.get("task", {}), tasks)
    problems += wrong_in_task
    hooks, wrong = parse_hooks(config.get("hooks"))
    settings = None
    given = {key: config[key] for key in config if key in Settings.model_fields}
    try:
        # Without a valid task too: the mistakes in all the other sections are reported beside those of the task.
        settings = Settings.model_validate(given | {"task": task or TaskKeys()})
    except ValidationError as error:
        problems += problems_of(error, "", Settings)
    problems += wrong
    if problems or settings is None:
        raise SpecError(problems)
    return Experiment(settings, Spec(tuple(hooks), seed=settings.seed), tuple(notes))


def parse_spec(config: Mapping[str, Any], seed: int = 0) -> Spec:
    """Validate ``{"hooks": {...}}`` or the hooks mapping itself.

    Raises SpecError with every mistake in it.
    """
    if not isinstance(config, Mapping):
        raise SpecError([Problem("hooks", f"found {shown(config)}, expected a mapping from name to hook")])
    wrapped = "hooks" in config and not _is_hook(config["hooks"])
    _refuse_beyond_limits(config, "" if wrapped else "hooks")
    problems = [_unknown_root(key) for key in config if wrapped and key not in ROOT_KEYS]
    hooks, wrong = parse_hooks(config["hooks"] if wrapped else config)
    if problems or wrong:
        raise SpecError([*problems, *wrong])
    return Spec(tuple(hooks), seed=seed)


def _refuse_beyond_limits(config: Mapping[str, Any], where: str = "") -> None:
    if problem := beyond_limits(config, where):
        raise SpecError([problem])


def _is_hook(body: Any) -> bool:
    """Whether it is the body of a hook, which may be called "hooks", and not the mapping of all hooks."""
    return isinstance(body, Mapping) and (isinstance(body.get("action"), str) or callable(body.get("action")))


ROOT_KEYS = (*Settings.model_fields, "hooks")


def _unknown_root(key: Any) -> Problem:
    if key == "experiment":
        hint = "put `# @package _global_` on the first line of the experiment file"
        return Problem("experiment", "unknown key: an experiment file forgot `# @package _global_`", hint)
    if key == "defaults":
        return Problem(
            "defaults", "is Hydra's: only composed files know it", "use load_spec(experiment=NAME)"
        )
    if key == "trust":
        hint = "type it: +trust=[mypkg], or set HOOKRUN_TRUST=mypkg in the environment"
        return Problem("trust", "is taken from the command line only, never from a file", hint)
    return Problem(str(key), "unknown key", nearest(str(key), ROOT_KEYS))
