"""Compiles an experiment's hooks and proves them by a trial run; one trial for all jobs with the same structure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from hookrun.data import DataInfo, Split
from hookrun.data.settings import Data
from hookrun.engine.prove.batch import TwoSizes
from hookrun.engine.prove.trial import Example, Plan, compile_plan
from hookrun.engine.spec import Spec
from hookrun.errors import CompileError
from hookrun.run.experiment.metrics.fit import SeenOutput
from hookrun.run.experiment.prepared import EXAMPLE_BATCH, Parts, Score
from hookrun.run.experiment.run_values import RunValues
from hookrun.run.experiment.task import JobCache, model_key


def compiled(
    parts: Parts,
    info: DataInfo,
    model: nn.Module,
    split: Split | None,
    *,
    example: Callable[[int], Example],
    training: bool,
    score: Score | None,
    seen: SeenOutput,
    cache: JobCache | None = None,
) -> Plan:
    """Compile the hooks for the model, and check them by a trial run with an example.

    split:    the split whose samples the hooks see first; None if they see several splits without training
    example:  a number of samples -> the arguments of a model call with them
    training: whether the model is trained; otherwise a backward pass follows the forward only if there is a score
    score:    (output, targets) -> the score from which a backward pass without training starts
    seen:     takes note of the output
    cache:    of a sweep, for one trial run for all jobs with the same structure of hooks

    Two jobs have the same structure of hooks if model, data, task and `compute` are the same, and the hooks differ only
    in floating-point parameters of actions, which change values but not shapes. Integers, strings, flags, lengths of
    lists, `select`, `target`, `index`, `when` and the arguments of functions must be equal.

    Raises CompileError, and SpecError if the score cannot be computed from the model's output.
    """
    settings, hooks = parts.experiment.settings, parts.experiment.hooks
    runs = RunValues.of(parts.experiment, split, info)
    compiling = partial(compile_plan, hooks, model, values=runs, training=training)
    target = info.example_target(EXAMPLE_BATCH)
    backward = training if score is None else lambda output: score(output, target, None)

    def proven(samples: int) -> Plan:
        return compiling(
            example=example(samples),
            two=two_sizes(example, samples, settings.data),
            backward=backward,
            see=partial(seen.see, samples),
        )

    if cache is None:
        plan = proven(EXAMPLE_BATCH)
        if plan.unchecked is not None and settings.data.batch_size == 1 and score is None:
            return proven(1)
        return plan
    loss = settings.train.loss if score is not None else None
    dumped = None if loss is None else loss.model_dump(mode="json")
    key = json.dumps([model_key(settings), training, dumped, structure(hooks)])
    if key not in cache.tried:
        if cache.is_over:
            cache.unproven += 1
            return compiling(backward=training)
        cache.proven += 1
        cache.tried[key] = None
        cache.seen[key] = seen
        try:
            return proven(EXAMPLE_BATCH)
        except CompileError as error:
            cache.tried[key] = error
            raise
    refusal = cache.tried[key]
    if refusal is not None:
        raise refusal
    vars(seen).update(vars(cache.seen[key]))
    return compiling(backward=training)


def two_sizes(example: Callable[[int], Example], samples: int, settings: Data) -> TwoSizes | None:
    """The example with one sample more than `samples`; None if each batch is one sample that is not stacked."""
    if settings.unstacked and settings.samples_of_batch == 1:
        return None
    return TwoSizes(example(samples + 1), (samples, samples + 1))


ARGS = "args"
"""A key whose mapping is passed to a user's code, which may use any number in it as a size."""


def structure(hooks: Spec) -> list[Any]:
    """A value that is equal for hooks of the same structure; see `compiled`."""
    structures: list[Any] = []
    for hook in hooks.hooks:
        if hook.keys.enabled:
            plain = hook.to_dict()
            structures.append([hook.name, {**plain, "params": _without_fractions(plain["params"])}])
    return structures


def _without_fractions(value: Any) -> Any:
    if isinstance(value, float):
        return "a fraction"
    if isinstance(value, Mapping):
        return {key: inner if key == ARGS else _without_fractions(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_fractions(inner) for inner in value]
    return value
