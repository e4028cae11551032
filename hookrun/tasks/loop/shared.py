"""What the jobs of a sweep have in common while they are checked: models are built, and hooks proven, once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import monotonic
from typing import Any

from torch import nn

from hookrun.data import DataInfo
from hookrun.errors import CompileError, SpecError
from hookrun.proving import Example, Plan, Score, compile_plan
from hookrun.run_values import UsedBy
from hookrun.spec import HookSpec, Settings, Spec
from hookrun.tasks.loop.built import Made, Maker

ARGS = "args"
"""A key whose mapping is handed to code that may make a shape of any number in it."""


class SharedMaker(Maker):
    """Makes what it has not made before.

    It keeps one model, the last: jobs that share theirs should be checked one after another. The names that hooks
    select are matched for every job. A fake run is made once for all hooks of one structure, until `seconds` are over.

    Two jobs have the same structure of hooks where model, data, task and `compute` are the same, and their hooks differ
    in nothing but numbers with a fraction among the parameters of actions: those change values and no shape. Whole
    numbers, texts, flags, the lengths of lists, `select`, `target`, `index` and `when` count, and so do the arguments
    that a function is called with.

    proven:   how many fake runs were made
    unproven: how many jobs were left without one
    """

    def __init__(self, seconds: float) -> None:
        self.proven = self.unproven = 0
        self._end = monotonic() + seconds
        self._last: tuple[str, Made | SpecError] | None = None
        self._found = dict[str, CompileError | None]()

    def model(self, settings: Settings, info: DataInfo | None, trust: frozenset[str]) -> Made:
        """The model of the job before where it is the same one."""
        key = model_key(settings)
        if self._last is None or self._last[0] != key:
            self._last = None  # two large models need not fit into memory
            try:
                self._last = key, super().model(settings, info, trust)
            except SpecError as error:
                self._last = key, error
        made = self._last[1]
        if isinstance(made, SpecError):
            raise made
        return made

    def plan(
        self,
        hooks: Spec,
        model: nn.Module,
        *,
        used_by: UsedBy,
        example: Example,
        training: bool,
        score: Score | None,
    ) -> Plan:
        """The plan, with shapes where this job is the first of its structure."""
        settings = used_by.settings
        loss = None if score is None or settings is None else settings.train.loss.model_dump(mode="json")
        shared = None if settings is None else model_key(settings)
        key = json.dumps([shared, training, loss, structure(hooks)])
        if key in self._found:
            if (found := self._found[key]) is not None:
                raise found
        elif monotonic() >= self._end:
            self.unproven += 1
        else:
            self.proven += 1
            try:
                plan = super().plan(
                    hooks, model, used_by=used_by, example=example, training=training, score=score
                )
            except CompileError as error:
                self._found[key] = error
                raise
            self._found[key] = None
            return plan
        return compile_plan(hooks, model, used_by=used_by, training=training, backward=training)


def model_key(settings: Settings) -> str:
    """The same for jobs with the same model, data and task, of which the same parameters are frozen."""
    sections = [settings.model, settings.data, settings.task, settings.compute]
    dumped = [each.model_dump(mode="json") for each in sections]
    return json.dumps([settings.task.name, str(settings.train.parameters), *dumped])


def structure(hooks: Spec) -> list[Any]:
    """What tells hooks apart that may give other shapes; see `SharedMaker`."""
    return [_of_hook(hook) for hook in hooks.hooks if hook.keys.enabled]


def _of_hook(hook: HookSpec) -> Any:
    plain = hook.to_dict()
    return [hook.name, {**plain, "params": _without_fractions(plain["params"])}]


def _without_fractions(value: Any) -> Any:
    if isinstance(value, float):
        return "a fraction"
    if isinstance(value, Mapping):
        return {key: each if key == ARGS else _without_fractions(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_fractions(each) for each in value]
    return value
