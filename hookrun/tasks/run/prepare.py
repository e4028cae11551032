"""Prepares an experiment: builds what it names, compiles its hooks into a plan, and checks both before any file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookrun import data, models
from hookrun.actions.python_values import InlineFunction
from hookrun.data import DataInfo, Split
from hookrun.data.samples import Samples
from hookrun.errors import CompileError, Problem, SpecError, listed
from hookrun.plan.plan import PlannedHook
from hookrun.prove.trial import Example, Plan, compile_plan
from hookrun.run_values import PendingRun, RunReferences, Source, other_runs, with_found_weights
from hookrun.spec import Experiment, HookSpec, Settings, Spec
from hookrun.spec.tokens import Tokens
from hookrun.store.records import UsedRunRecord
from hookrun.tasks.base import JobCache, Ready, metrics_of, model_key
from hookrun.tasks.metrics.losses import WHERE as LOSS
from hookrun.tasks.metrics.losses import TrainLoss, load_loss
from hookrun.tasks.metrics.metrics import WHERE as METRICS
from hookrun.tasks.metrics.metrics import Metric, load_metrics
from hookrun.tasks.run.components import EXAMPLE_BATCH, Components, Mistakes, as_call, components, model_for
from hookrun.tasks.run.session import device_named, session
from hookrun.tasks.training.parameter_groups import Trained
from hookrun.trust.callables import Code
from hookrun.trust.load import DATA, MODELS, OPTIMIZERS, SCHEDULERS, Kind, load

MOST_CHECKED = 4_096
"""The number of samples that are checked before the run; a later sample without a span makes the run fail there."""

Score = Callable[[Any, Tensor], Tensor]
"""(output, targets) -> the score from which a backward pass without training starts."""


@dataclass(frozen=True)
class Prepared(Ready):
    """An experiment with everything that it names (see `Components`) and its compiled plan.

    notes:   notes that are shown with the plan
    trained: the parameters that the task trains; None if it does not train
    lines:   lines about the task that are shown with the plan
    """

    data: DataInfo
    model: nn.Module
    device: torch.device
    weights: str
    leftover: Mapping[str, Tensor]
    applied: frozenset[str]
    loss: TrainLoss
    metrics: tuple[Metric, ...]
    trust: frozenset[str]
    plan: Plan
    notes: tuple[str, ...]
    trained: Trained | None = None
    lines: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[UsedRunRecord, ...]:
        """The other runs from which hooks take values."""
        return self.plan.runs


def whole(
    parts: Components, experiment: Experiment, plan: Plan | None, notes: list[str], *, trains: bool
) -> Prepared:
    """The whole, after every mistake was refused, with the code and the other runs that the plan names."""
    # A part that is missing has been refused.
    assert plan is not None and parts.loss is not None and parts.metrics is not None
    code = own_code(experiment.settings, parts.loss, parts.metrics, trains=trains)
    plan = replace(plan, code=code, runs=(*plan.runs, *other_runs(experiment)))
    return Prepared(**vars(parts), experiment=experiment, plan=plan, notes=(*experiment.notes, *notes))


def check_selectors(hooks: Spec, model: nn.Module | None, runs: RunReferences, mistakes: Mistakes) -> None:
    """Check the selectors alone where data or model are not valid; the notes say what was not checked.

    model: None if it is not valid
    """
    if not hooks.hooks:
        return
    if model is None:
        mistakes.notes.append("the hooks were not checked, because the model is not valid")
        return
    mistakes.notes.append("shapes were not checked, because the data is not valid")
    mistakes.collected(lambda: compile_plan(hooks, model, runs=runs))


def compiled(
    experiment: Experiment,
    model: nn.Module,
    info: DataInfo,
    split: Split | None,
    *,
    example: Example,
    training: bool,
    score: Score | None,
    cache: JobCache | None = None,
) -> Plan:
    """Compile the hooks for the model, and check them by a trial run with an example.

    split:    the split whose samples the hooks see first; None if they see several splits without training
    example:  the arguments of a model call
    training: whether the model is trained; otherwise a backward pass follows the forward only if there is a score
    score:    (output, targets) -> the score from which a backward pass without training starts
    cache:    of a sweep, for one trial run for all jobs with the same structure of hooks

    Two jobs have the same structure of hooks if model, data, task and `compute` are the same, and the hooks differ only
    in floating-point parameters of actions, which change values but not shapes. Integers, strings, flags, lengths of
    lists, `select`, `target`, `index`, `when` and the arguments of functions must be equal.

    Raises CompileError, and SpecError if the score cannot be computed from the model's output.
    """
    settings, hooks = experiment.settings, experiment.hooks
    target = info.example_target(EXAMPLE_BATCH)
    runs = RunReferences.of(experiment, split, info)
    backward = training if score is None else lambda output: score(output, target)

    def tried() -> Plan:
        return compile_plan(hooks, model, runs=runs, example=example, training=training, backward=backward)

    if cache is None:
        return tried()
    loss = None if score is None else settings.train.loss.model_dump(mode="json")
    key = json.dumps([model_key(settings), training, loss, structure(hooks)])
    if key not in cache.tried and not cache.is_over:
        cache.proven += 1
        try:
            plan = tried()
        except CompileError as error:
            cache.tried[key] = error
            raise
        cache.tried[key] = None
        return plan
    if (refusal := cache.tried.get(key)) is not None:
        raise refusal
    cache.unproven += key not in cache.tried
    return compile_plan(hooks, model, runs=runs, training=training, backward=training)


ARGS = "args"
"""A key whose mapping is passed to a user's code, which may use any number in it as a size."""


def structure(hooks: Spec) -> list[Any]:
    """A value that is equal for hooks of the same structure; see `compiled`."""
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


def prepare_alone(
    experiment: Experiment, hooks: Spec, split: Split, trust: frozenset[str], *, tries: bool = True
) -> Prepared:
    """The experiment with these hooks instead of its own, and without the checks of its task.

    tries: check the hooks by a trial run in training mode

    Raises SpecError or CompileError with every mistake.
    """
    mistakes = Mistakes()
    experiment = mistakes.collected(lambda: with_found_weights(experiment)) or experiment
    parts = components(experiment.settings, split, trust, mistakes)
    mistakes.refuse()
    info, model = parts.data, parts.model
    assert info is not None and model is not None  # else there is a mistake
    runs = RunReferences.of(experiment, split, info)
    example = as_call(info.example(EXAMPLE_BATCH), model) if tries else None
    plan = compile_plan(hooks, model, runs=runs, example=example, training=True)
    return Prepared(**vars(parts), experiment=experiment, plan=plan, notes=experiment.notes)


def without_data(
    experiment: Experiment, hooks: Spec, split: Split | None, error: SpecError, trust: frozenset[str]
) -> Prepared:
    """Compile the hooks for a model that does not depend on the data, which is missing, as `error` says.

    The result can only be shown: shapes are not checked, and the plan says why.

    Raises `error` if something else is invalid too, or if the model needs the data; CompileError for the hooks.
    """
    settings = experiment.settings
    if not all(problem.where.startswith("data.") for problem in error.errors):
        raise error
    try:
        with session(settings.compute, settings.seed):
            model = model_for(settings, None, trust)
    except SpecError:
        raise error from None
    leftover = models.load_weights(model, settings.model)
    nothing = DataInfo(settings.data.name, {}, None, None, {"train": 0, "val": 0})
    plan = compile_plan(hooks, model, runs=RunReferences.of(experiment, split))
    return Prepared(
        experiment=experiment,
        data=nothing,
        model=model,
        device=device_named(settings.compute.device),
        weights=models.origin(settings.model),
        leftover=leftover,
        applied=models.applied_hooks(settings.model),
        loss=load_loss(settings.train.loss),
        metrics=load_metrics(metrics_of(settings.task)),
        trust=trust,
        plan=replace(plan, unchecked="; ".join(f"{each.where}: {each.what}" for each in error.errors)),
        notes=tuple(experiment.notes),
    )


def check_rows(plan: Plan, samples: int | None, *, trains: bool) -> None:
    """Check that the other runs have a row for each sample that the hooks will see.

    samples: the hooks see samples with ids below this; None: not known beforehand
    trains:  the hooks see training samples, then validation samples

    Raises CompileError.
    """
    problems = list[Problem]()
    for hook in plan.hooks:
        for field, rows in _different_values(hook):
            if isinstance(rows, Tensor | PendingRun | InlineFunction) or rows.draws or samples is None:
                continue
            where = f"{hook.spec.where}.{field}"
            if trains and hook.spec.keys.when.mode != "train":
                text = "each training sample uses its own row, and validation samples have no rows"
                problems.append(Problem(where, text, "add when: {mode: train}"))
            elif len(missing := rows.missing(torch.arange(samples))):
                hint = "capture them in that run too, or limit this run: train.limit_batches"
                problems.append(Problem(where, rows.lacks(missing), hint))
    if problems:
        raise CompileError(problems)


def _different_values(hook: PlannedHook) -> Iterator[tuple[str, Source]]:
    """(field, value) of each value that the hook takes from a file or another run, each value once."""
    for field, values in hook.values.items():
        yield from ((field, value) for value in {id(value): value for value in values.values()}.values())


def check_leftover(plan: Plan, leftover: Mapping[str, Tensor]) -> None:
    """Check that hooks add all tensors of the weights file that the model does not have. Raises SpecError."""
    unknown = sorted(set(leftover) - set(added_names(plan)))
    if unknown:
        names = listed(unknown, 8)
        text = f"the file holds {len(unknown)} tensors that neither the model nor its hooks have: {names}"
        hint = "use the model and the hooks that the file was saved with"
        raise SpecError([Problem("model.weights", text, hint)])


def added_names(plan: Plan) -> list[str]:
    """The names, in the model, of the parameters that the plan's hooks add."""
    return [
        f"{match.path}.{name}" if match.path else name
        for hook in plan.hooks
        if (name := hook.spec.action.adds(hook.spec.name)) is not None
        for match in hook.matches
    ]


def own_code(
    settings: Settings, loss: TrainLoss, metrics: Sequence[Metric], *, trains: bool
) -> dict[str, Code]:
    """Key path -> its code, for everything that is loaded by name from a trusted package.

    trains: include the optimizer and its schedule
    """
    found = {where: load(text, kind, where).code for where, text, kind in _factories(settings)}
    if loss.code is not None:
        found[LOSS] = loss.code
    found |= {f"{METRICS}.{each.name}": each.code for each in metrics if each.code is not None}
    train = settings.train
    for where, named, kind in (
        ("train.optimizer.name", train.optimizer, OPTIMIZERS),
        ("train.scheduler.name", train.scheduler, SCHEDULERS),
    ):
        if trains and named is not None and ":" in named.name:
            found[where] = load(named.name, kind, where).code
    return found


def _factories(settings: Settings) -> Iterator[tuple[str, str, Kind]]:
    if settings.model.factory is not None:
        yield "model.factory", settings.model.factory, MODELS
    if settings.data.factory is not None:
        yield "data.factory", settings.data.factory, DATA


def check_spans(hooks: Iterable[HookSpec], settings: Settings, split: Split, samples: int | None) -> None:
    """Raise CompileError if samples lack the spans of a hook. Hooks with a schedule may not see them, and are not
    checked.

    samples: the hooks see samples with ids below this; None: not known beforehand
    """
    asked = [(each.keys.tokens, each.where) for each in hooks if each.keys.enabled and each.keys.when.always]
    problems = list(missing_spans(asked, settings, split, samples))
    if problems:
        raise CompileError(problems)


def missing_spans(
    clauses: Iterable[tuple[Tokens | None, str]], settings: Settings, split: Split, samples: int | None
) -> Iterator[Problem]:
    """A problem for each span that a sample lacks.

    clauses: (clause, the key path of its owner)
    samples: samples with ids below this are checked; None: nothing is checked
    """
    strict = [
        (clause, owner) for clause, owner in clauses if clause is not None and clause.missing == "error"
    ]
    named = [
        (each.span, owner) for clause, owner in strict for each in clause.filters if each.span is not None
    ]
    if not named or not samples:
        return
    found = data.load(settings.data, split, seed=settings.seed)
    count = min(samples, len(found), MOST_CHECKED)
    spans = found.spans(torch.arange(count))
    for name, owner in dict.fromkeys(named):
        if name in spans and (first := _without(spans[name])) is not None:
            yield Problem(
                f"{owner}.tokens.span",
                f"{_called(found, first)} of the split '{split}' has no span {name!r}",
                "give it one, or leave such samples out: tokens: {span: …, missing: skip}",
            )


def _without(bounds: torch.Tensor) -> int | None:
    """The first sample without a span; None if every sample has one."""
    lacks = ((bounds[:, 0] < 0) | (bounds[:, 1] <= bounds[:, 0])).nonzero()
    return int(lacks[0]) if len(lacks) else None


def _called(samples: Samples, number: int) -> str:
    file = samples.file(number)
    return f"sample {number} ({file})" if file else f"sample {number}"
