"""An experiment: its settings and its hooks, validated together, with every mistake and its key path. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hookrun.engine.keys import HOOKS_FROM, ROOT_KEYS
from hookrun.engine.spec import Spec, refuse_beyond_limits, unknown_root, without_boolean_keys
from hookrun.engine.spec.hook import parse_hooks
from hookrun.engine.validation import MISSING, parse, paths_to
from hookrun.errors import Problem, spec_error
from hookrun.run.experiment.settings import PREVIOUS, Need, Settings, TaskKeys
from hookrun.run.experiment.task_keys import parse_task
from hookrun.store.bundles import read_bundle


@dataclass(frozen=True)
class Experiment:
    """A whole experiment: its settings and its hooks.

    notes: notes that are shown beside the plan
    runs:  name -> directory of each run of its `needs`, and of `previous`; None: the run does not exist yet
    takes: key path -> name of the run that was given there and has been replaced by its file
    """

    settings: Settings
    hooks: Spec
    notes: tuple[str, ...] = ()
    runs: Mapping[str, str | None] = field(default_factory=dict)
    takes: Mapping[str, str] = field(default_factory=dict)

    def with_runs(self, made: Mapping[Need, str | None], previous: str | None = None) -> Experiment:
        """The experiment with the directories of its runs.

        made:     need -> the directory of its run; None: the need has not been run yet
        previous: the directory of the run before this one; None: it is looked up when the experiment refers to it

        Raises SpecError for a need that is not in `made`.
        """
        runs: dict[str, str | None] = {}
        for name, need in self.settings.needs.items():
            if need not in made:
                raise spec_error(
                    f"needs.{name}",
                    f"{need} was not known when the sweep began, and a job does not run its own needs",
                    "let the overrides of a need hold no key that the sweeper chooses as it goes",
                )
            runs[name] = made[need]
        if previous is not None:
            runs[PREVIOUS] = previous
        return replace(self, runs=runs)

    def of_a_sweep(self) -> Experiment:
        """The experiment as a job of a sweep, which by default keeps only the best weights."""
        train = self.settings.train
        if train.checkpoint.save is not None:
            return self
        checkpoint = train.checkpoint.model_copy(update={"save": "best"})
        changed = {"train": train.model_copy(update={"checkpoint": checkpoint})}
        return replace(self, settings=self.settings.model_copy(update=changed))


def read_experiment(
    config: Mapping[str, Any], tasks: Mapping[str, type[TaskKeys]]
) -> tuple[Experiment | None, list[Problem]]:
    """Validate the root mapping of a composed configuration: the experiment, or None and every mistake.

    tasks: every task by name

    Raises SpecError for a configuration that is too large to be checked, and for a bundle that cannot be read.
    """
    refuse_beyond_limits(config)
    config, problems = without_boolean_keys(config)
    task, notes, wrong_in_task = parse_task(config.get("task", {}), tasks)
    written = config.get("hooks")
    hooks, wrong_in_hooks = parse_hooks(written if task is None else task.completed(written))
    if task is None and isinstance(config.get("task"), Mapping) and config["task"].get("over"):
        # Its values would complete a hook.
        wrong_in_hooks = [problem for problem in wrong_in_hooks if problem.what != MISSING]
    given = {key: config[key] for key in config if key in Settings.model_fields}
    settings, wrong = parse(Settings, given | {"task": task or TaskKeys()}, "")
    for key, value in config.items():
        if key not in ROOT_KEYS:
            problems.append(unknown_root(key, value, paths_to(str(key), Settings)))
    problems += [*wrong_in_task, *wrong, *wrong_in_hooks]
    if problems or settings is None:
        return None, problems
    origin = None
    if settings.hooks_from is not None:
        origin = read_bundle(settings.hooks_from, HOOKS_FROM).spec.bundle
    spec = Spec(tuple(hooks) if settings.hooked else (), settings.seed, origin)
    return Experiment(settings, spec, tuple(notes)), []
