"""Reuses work among the jobs of a sweep while they are checked: equal models are built, and equal hooks tried, once."""

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
from hookrun.tasks.loop.built import LoadedModel, Maker

ARGS = "args"
"""A key whose mapping is passed to a user's code, which may use any number in it as a size."""


class SharedMaker(Maker):
    """A Maker that reuses models and results of trial runs.

    Only the last model is kept, so jobs with the same model should be checked one after another. Selectors of hooks are
    matched for every job. One trial run is made for all hooks of the same structure, until `seconds` have passed.

    Two jobs have the same structure of hooks if model, data, task and `compute` are the same, and the hooks differ only
    in floating-point parameters of actions, which change values but not shapes. Integers, strings, flags, lengths of
    lists, `select`, `target`, `index`, `when` and the arguments of functions must be equal.

    proven:   the number of trial runs that were made
    unproven: the number of jobs without a trial run
    """

    def __init__(self, seconds: float) -> None:
        self.proven = self.unproven = 0
        self._end = monotonic() + seconds
        self._last: tuple[str, LoadedModel | SpecError] | None = None
        self._found = dict[str, CompileError | None]()

    def model(self, settings: Settings, info: DataInfo | None, trust: frozenset[str]) -> LoadedModel:
        """The model with its weights; that of the last job, if it is the same. Raises SpecError."""
        key = model_key(settings)
        if self._last is None or self._last[0] != key:
            self._last = None  # frees the last model first: two large models may not fit into memory
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
        """The plan; shapes are only known for the first job of a structure. Raises CompileError."""
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
    """A key that is equal for jobs with the same model, data, task, `compute` and frozen parameters."""
    sections = [settings.model, settings.data, settings.task, settings.compute]
    dumped = [each.model_dump(mode="json") for each in sections]
    return json.dumps([settings.task.name, str(settings.train.parameters), *dumped])


def structure(hooks: Spec) -> list[Any]:
    """A value that is equal for hooks of the same structure; see `SharedMaker`."""
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
