"""Prepares an experiment: builds what it names, compiles its hooks into a plan, and checks both before any file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookrun import data, models
from hookrun.data import DataInfo, Split
from hookrun.data.collate import WHERE as COLLATE
from hookrun.data.info import SPLITS
from hookrun.data.samples import IGNORED, Samples
from hookrun.data.settings import Data
from hookrun.data.tokens import AMBIGUOUS
from hookrun.engine.plan.model_tree import unhookable_model
from hookrun.engine.plan.outside import Rows, UsedRun
from hookrun.engine.prove.batch import TwoSizes
from hookrun.engine.prove.trial import Example, Plan, compile_plan
from hookrun.engine.runtime.tokens.calls import DECODER_IDS, DECODER_MASK, parameters_of
from hookrun.engine.runtime.wiring import Around
from hookrun.engine.spec import Spec
from hookrun.engine.spec.tokens import Tokens
from hookrun.engine.trust.callables import Code
from hookrun.engine.trust.load import COLLATES, DATA, MODELS, OPTIMIZERS, SCHEDULERS, load
from hookrun.engine.trust.load import METRICS as OWN_METRIC
from hookrun.errors import CompileError, Mistakes, Problem, Refusal, SpecError, listed
from hookrun.models.arguments import unfit_tokens
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.metrics.fit import SeenOutput
from hookrun.run.experiment.metrics.losses import WHERE as LOSS
from hookrun.run.experiment.metrics.losses import ActivationLoss, TrainLoss, load_loss, loss_of
from hookrun.run.experiment.metrics.metrics import WHERE as METRICS
from hookrun.run.experiment.metrics.metrics import Metric, load_metrics
from hookrun.run.experiment.metrics.output import OutputReader
from hookrun.run.experiment.optimizers import OPTIMIZER, SCHEDULER, check_arguments
from hookrun.run.experiment.parameter_groups import Trained, chosen
from hookrun.run.experiment.run_values import RunValues, with_found_weights
from hookrun.run.experiment.session import device_of, session
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task import JobCache, Ready, Task, metrics_of, model_key

EXAMPLE_BATCH = 2  # batch norm needs more than one sample in training mode
MOST_CHECKED = 4_096
"""The number of samples that are checked before the run; a later sample without a span makes the run fail there."""

Score = Callable[[Any, Tensor, None], Tensor]
"""(output, targets, None) -> the score from which a backward pass without training starts."""


@dataclass(frozen=True)
class Prepared(Ready):
    """An experiment with everything that it names and its compiled plan.

    weights:  the source of the model's weights: `random`, the name of published weights, or a path
    leftover: tensors of the weights file that the model does not have: parameters that hooks will add
    applied:  the identities of the hooks that had changed the model when the weights file was written
    loss:     the loss of `train.loss`
    metrics:  the metrics of `task.metrics`
    trust:    names of the packages whose code the experiment may use
    notes:    notes that are shown with the plan
    trained:  the parameters that the task trains; None if it does not train
    lines:    lines about the task that are shown with the plan
    around:   what runs in place of what each hook does, see `Installation`; None: the hook itself
    read:     the samples of the splits that were read before the run, to compare those of several ranks
    """

    trust: frozenset[str]
    data: DataInfo
    model: nn.Module
    device: torch.device
    weights: str
    leftover: Mapping[str, Tensor]
    applied: frozenset[str]
    loss: TrainLoss
    metrics: tuple[Metric, ...]
    plan: Plan
    notes: tuple[str, ...]
    trained: Trained | None = None
    lines: tuple[str, ...] = ()
    around: Around | None = None
    read: dict[Split, Samples] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[UsedRun, ...]:
        """The other runs from which hooks take values."""
        return self.plan.runs


@dataclass
class Parts(Mistakes):
    """What an experiment names, as in `Prepared`; None where it is not valid."""

    experiment: Experiment
    trust: frozenset[str]
    data: DataInfo | None = None
    model: nn.Module | None = None
    device: torch.device | None = None
    weights: str = ""
    leftover: Mapping[str, Tensor] = field(default_factory=dict)
    applied: frozenset[str] = frozenset()
    loss: TrainLoss | None = None
    metrics: tuple[Metric, ...] | None = None

    def prepared(self, plan: Plan, notes: Iterable[str], **more: Any) -> Prepared:
        """The prepared experiment, after all mistakes were refused."""
        built = {name: value for name, value in vars(self).items() if name in Prepared.__dataclass_fields__}
        return Prepared(**built, plan=plan, notes=tuple(notes), **more)


def prepare_alone(
    experiment: Experiment, hooks: Callable[[nn.Module], Spec], split: Split, trust: frozenset[str]
) -> Prepared:
    """The experiment with these hooks instead of its own, tried in training mode, without the checks of its task.

    They do not ask which dimensions are the batch.

    Raises SpecError or CompileError with every mistake.
    """
    parts = build(experiment, split, trust)
    parts.refuse()
    info, model, experiment = parts.data, parts.model, parts.experiment
    assert info is not None and model is not None  # else there is a mistake
    runs = RunValues.of(experiment, split, info)
    example = as_call(info.example(EXAMPLE_BATCH), model)
    plan = compile_plan(hooks(model), model, values=runs, example=example, two=None, training=True)
    return parts.prepared(plan, experiment.notes)


def without_data(
    experiment: Experiment,
    hooks: Callable[[nn.Module], Spec],
    split: Split | None,
    error: SpecError,
    trust: frozenset[str],
) -> Prepared:
    """Compile the hooks for a model that does not depend on the data, which is missing, as `error` says.

    The result can only be shown: shapes are not checked, and the plan says why.

    Raises `error` if something else is invalid too, or if the model needs the data; CompileError for the hooks.
    """
    if not all(problem.where.startswith("data.") for problem in error.errors):
        raise error
    parts = build(experiment, split or SPLITS[0], trust, with_data=False)
    if parts.model is None:
        raise error from None
    experiment = parts.experiment
    parts.data = DataInfo(experiment.settings.data.name, {}, None, None, {"train": 0, "val": 0})
    runs = RunValues.of(experiment, split)
    plan = compile_plan(hooks(parts.model), parts.model, values=runs)
    why = "; ".join(f"{problem.where}: {problem.what}" for problem in error.errors)
    return parts.prepared(replace(plan, unchecked=why), experiment.notes)


# ---- model, data, loss, metrics --------------------------------------------------------------------------------


def build(
    experiment: Experiment,
    split: Split,
    trust: frozenset[str],
    *,
    cache: JobCache | None = None,
    with_data: bool = True,
) -> Parts:
    """Describe the data, and build the model with its weights. Reads no data.

    split:     the split whose samples are the model's inputs
    cache:     has the model of the job that was checked before
    with_data: false: do as if there were no data
    """
    parts = Parts(experiment, trust)
    parts.experiment = parts.tried(with_found_weights, experiment) or experiment
    settings = parts.experiment.settings
    parts.device = parts.tried(device_of, settings.compute)
    info = parts.data = parts.tried(data.describe, settings.data, split) if with_data else None
    of_tokens = info is not None and info.tokenizer is not None
    classes = None if info is None else info.vocab_size or info.num_classes
    reader = OutputReader(settings.train.output, classes)
    parts.loss = parts.tried(load_loss, loss_of(settings.train, info), reader, tokens=of_tokens)
    if parts.loss is not None and parts.loss.module is not None and parts.device is not None:
        parts.loss.module.to(parts.device)
    parts.metrics = parts.tried(load_metrics, metrics_of(settings.task))
    models_known = {} if cache is None else cache.model
    if (key := model_key(settings)) not in models_known:
        models_known.clear()  # frees the last model first: two large models may not fit into memory
        models_known[key] = load_model(settings, info, trust, stands_in=with_data)
    parts.model, parts.leftover, parts.applied, problems = models_known[key]
    parts.add(problems)
    if isinstance(function := parts.loss and parts.loss.function, ActivationLoss) and parts.model is not None:
        parts.add(function.problems(parts.model))
    if of_tokens and info is not None and parts.model is not None:
        parts.add(unfit_tokens(parts.model, info.vocab_size, info.length))
    runs_first = parts.experiment.takes.get("model.weights.run") if settings.model.weights is None else None
    parts.weights = (
        f"those of {runs_first}, which runs first" if runs_first else models.origin(settings.model)
    )
    return parts


def load_model(
    settings: Settings, info: DataInfo | None, trust: frozenset[str], *, stands_in: bool = True
) -> tuple[nn.Module | None, Mapping[str, Tensor], frozenset[str], list[Problem]]:
    """The model with its weights, `leftover` and `applied` as in `Prepared`, and the mistakes in model and weights.

    stands_in: if `info` is None, the model gets some shape, classes and vocabulary, on which names of modules do not
               depend
    """
    shape, classes, vocabulary, length = None, None, None, None
    if info is not None:
        shape = info.inputs.shape if isinstance(info.inputs, data.TensorInfo) else None
        classes, vocabulary, length = info.num_classes, info.vocab_size, info.length
    elif stands_in:
        shape, classes, vocabulary, length = (3, 64, 64), 10, 256, 256
    model = None
    try:
        with session(settings.compute, settings.seed):
            model = models.build(
                settings.model,
                sample_shape=shape,
                num_classes=classes,
                trust=trust,
                vocab_size=vocabulary,
                length=length,
            )
        if (weights := settings.model.own_weights) is None:
            return model, {}, frozenset(), []
        leftover = models.load_weights(model, weights, settings.model.strip_prefix)
    except Refusal as error:
        return model, {}, frozenset(), error.errors
    return model, leftover, models.applied_hooks(weights), []


def as_call(batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model call for the inputs of a batch: (positional, keyword).

    Named inputs, a mapping, are keyword arguments; the members of a tuple are positional ones; anything else, also a
    named tuple or a list, is one argument.

    An encoder-decoder derives its decoder's input from `labels`, shifted by one position. A mask of the padding in it
    is added if the batch does not have one.
    """
    if type(batch) is tuple:
        return batch, {}
    if not isinstance(batch, Mapping):
        return (batch,), {}
    named = dict(batch)
    makes_tokens = "labels" in named and DECODER_IDS not in named and DECODER_MASK not in named
    if makes_tokens and {DECODER_IDS, DECODER_MASK} <= parameters_of(model).keys():
        named[DECODER_MASK] = (named["labels"] != IGNORED).to(named["labels"].dtype)
    return (), named


def own_code(task: Task, settings: Settings, loss: TrainLoss, metrics: Sequence[Metric]) -> dict[str, Code]:
    """Key path -> its code, for everything that the task loads by name from a trusted package."""
    train = settings.train
    named = {
        "model.factory": (settings.model.factory, MODELS),
        "data.factory": (settings.data.factory, DATA),
        COLLATE: (settings.data.collate, COLLATES),
    }
    if task.trains:
        named["train.optimizer.name"] = train.optimizer.name, OPTIMIZERS
    if task.trains and train.scheduler is not None:
        named["train.scheduler.name"] = train.scheduler.name, SCHEDULERS
    if (scored := task.scored()) is not None:
        where, backward = scored
        named[f"{where.removesuffix('.score')}.score"] = backward.score, OWN_METRIC
    code = {
        where: load(name, kind, where).code for where, (name, kind) in named.items() if name and ":" in name
    }
    loaded = {LOSS: loss.code, **{f"{METRICS}.{metric.name}": metric.code for metric in metrics}}
    return code | {where: each for where, each in loaded.items() if each is not None}


# ---- hooks and plan --------------------------------------------------------------------------------------------


def trained_parameters(parts: Parts) -> Trained | None:
    """The parameters that the task trains, with all others frozen; None if the model is not valid."""
    model, train = parts.model, parts.experiment.settings.train
    if model is None or unhookable_model(model) is not None:  # compiling the hooks reports the latter
        return None
    trained, problems = chosen(train, parts.experiment.hooks, model)
    misnamed = any(problem.where.startswith((OPTIMIZER, SCHEDULER)) for problem in parts.problems)
    if not problems and not misnamed:
        problems = check_arguments(train, model, trained.groups)
    parts.add(problems)
    if not parts.problems:
        trained.freeze_rest(model)
    return trained


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
    target = info.example_target(EXAMPLE_BATCH)
    runs = RunValues.of(parts.experiment, split, info)
    compiling = partial(compile_plan, hooks, model, values=runs, training=training)
    backward = training if score is None else lambda output: score(output, target, None)

    def proven(samples: int) -> Plan:
        see, two = partial(seen.see, samples), two_sizes(example, samples, settings.data)
        return compiling(example=example(samples), two=two, backward=backward, see=see)

    if cache is None:
        plan = proven(EXAMPLE_BATCH)
        is_alone = plan.unchecked is not None and settings.data.batch_size == 1
        return proven(1) if is_alone and score is None else plan
    loss = (
        None if score is None or settings.train.loss is None else settings.train.loss.model_dump(mode="json")
    )
    key = json.dumps([model_key(settings), training, loss, structure(hooks)])
    if key not in cache.tried and not cache.is_over:
        cache.proven += 1
        cache.tried[key], cache.seen[key] = None, seen
        try:
            return proven(EXAMPLE_BATCH)
        except CompileError as error:
            cache.tried[key] = error
            raise
    if (refusal := cache.tried.get(key)) is not None:
        raise refusal
    cache.unproven += key not in cache.tried
    if key in cache.seen:
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
    enabled = {hook.name: hook.to_dict() for hook in hooks.hooks if hook.keys.enabled}
    return [[name, {**hook, "params": _without_fractions(hook["params"])}] for name, hook in enabled.items()]


def _without_fractions(value: Any) -> Any:
    if isinstance(value, float):
        return "a fraction"
    if isinstance(value, Mapping):
        return {key: each if key == ARGS else _without_fractions(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_fractions(each) for each in value]
    return value


def leftover_problems(plan: Plan, leftover: Mapping[str, Tensor]) -> Iterator[Problem]:
    """A problem if hooks do not add every tensor of the weights file that the model does not have."""
    added = {f"{owner}.{name}" if owner else name for owner, name in plan.added()}
    if unknown := sorted(set(leftover) - added):
        yield Problem(
            "model.weights",
            f"the file holds {len(unknown)} tensors that neither the model nor its hooks have: {listed(unknown, 8)}",
            "use the model and the hooks that the file was saved with, or save it without these",
        )


def row_problems(plan: Plan, samples: int | None, *, trains: bool) -> Iterator[Problem]:
    """A problem for each value of another run that lacks the row of a sample which its hook will see.

    samples: the hooks see samples with ids below this; None: not known beforehand
    trains:  the hooks see training samples, then validation samples
    """
    values = [
        (hook, field, rows)
        for hook in plan.hooks
        for field, by_module in hook.values.items()
        for rows in {id(rows): rows for rows in by_module.values()}.values()  # each once
    ]
    for hook, field_name, rows in values:
        if not isinstance(rows, Rows) or rows.draws or samples is None:
            continue
        where = f"{hook.spec.where}.{field_name}"
        if trains and hook.spec.keys.when.mode != "train":
            yield Problem(
                where,
                "each training sample uses its own row, and validation samples have no rows",
                "add when: {mode: train}",
            )
        elif lack := rows.lacking(torch.arange(samples)):
            yield Problem(
                where,
                lack,
                "capture them in that run too, or limit this run: train.limit_batches",
            )


def missing_spans(
    clauses: Iterable[tuple[Tokens | None, str]], settings: Settings, split: Split, samples: int | None
) -> Iterator[Problem]:
    """A problem for each span that a sample lacks, or whose text it has more than once.

    clauses: (clause, the key path of its owner)
    samples: samples with ids below this are checked; None: nothing is checked
    """
    named = [
        (tokens.span, owner)
        for clause, owner in clauses
        if clause is not None and clause.missing == "error"
        for tokens in clause.filters
        if tokens.span is not None
    ]
    if not named or not samples:
        return
    rows = data.load(settings.data, split, seed=settings.seed)
    spans = rows.spans(torch.arange(min(samples, len(rows), MOST_CHECKED)))
    for name, owner in dict.fromkeys(named):
        if name not in spans:
            continue
        first, end = spans[name].unbind(1)
        if len(lacking := ((first < 0) | (end <= first)).nonzero()):
            number = int(lacking[0])
            file = rows.file(number)
            sample = f"sample {number} ({file})" if file else f"sample {number}"
            what, hint = "has no", "give it one, or leave such samples out: tokens: {span: …, missing: skip}"
            if first[number] == AMBIGUOUS[0]:
                what, hint = (
                    "has more than once the text of the",
                    "give token positions in the data: [first, end]",
                )
            what = f"{sample} of the split '{split}' {what} span {name!r}"
            yield Problem(f"{owner}.tokens.span", what, hint)
