"""Builds what an experiment names: data, model with its weights, loss and metrics. Reads no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hookrun import data, models
from hookrun.data import DataInfo, Split
from hookrun.data.collate import WHERE as COLLATE
from hookrun.engine.plan.model_tree import unhookable_model
from hookrun.engine.trust.callables import Code, code_of_class
from hookrun.engine.trust.load import COLLATES, DATA, MODELS, OPTIMIZERS, SCHEDULERS, load
from hookrun.engine.trust.load import METRICS as OWN_METRIC
from hookrun.errors import Problem, Refusal
from hookrun.models.arguments import unfit_tokens
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.metrics.losses import WHERE as LOSS
from hookrun.run.experiment.metrics.losses import ActivationLoss, TrainLoss, load_loss, loss_of
from hookrun.run.experiment.metrics.metrics import WHERE as METRICS
from hookrun.run.experiment.metrics.metrics import Metric, load_metrics
from hookrun.run.experiment.metrics.output import OutputReader
from hookrun.run.experiment.optimizers import OPTIMIZER, SCHEDULER, check_arguments
from hookrun.run.experiment.parameter_groups import Trained, chosen
from hookrun.run.experiment.prepared import Parts
from hookrun.run.experiment.run_values import with_found_weights
from hookrun.run.experiment.session import device_of, session
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task import JobCache, Task, metrics_of, model_key


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
    if with_data:
        parts.data = parts.tried(data.describe, settings.data, split)
    _load_loss(parts)
    parts.metrics = parts.tried(load_metrics, metrics_of(settings.task))
    _build_model(parts, {} if cache is None else cache.model, with_data=with_data)
    first = parts.experiment.takes.get("model.weights.run")
    if first is not None and settings.model.weights is None:
        parts.weights = f"those of {first}, which runs first"
    else:
        parts.weights = models.origin(settings.model)
    return parts


def _load_loss(parts: Parts) -> None:
    """Load `train.loss`, with its module on the device."""
    info, train = parts.data, parts.experiment.settings.train
    classes = None if info is None else info.vocab_size or info.num_classes
    reader = OutputReader(train.output, classes)
    of_tokens = info is not None and info.tokenizer is not None
    loss = parts.loss = parts.tried(load_loss, loss_of(train, info), reader, tokens=of_tokens)
    if loss is not None and loss.module is not None and parts.device is not None:
        loss.module.to(parts.device)


def _build_model(parts: Parts, built: dict[str, BuiltModel], *, with_data: bool) -> None:
    """Build the model with its weights, or take the one that was built for the job before.

    built: key of a model -> the model; only the last one is kept
    """
    settings, info = parts.experiment.settings, parts.data
    key = model_key(settings)
    if key not in built:
        built.clear()  # frees the last model first: two large models may not fit into memory
        built[key] = load_model(settings, info, parts.trust, placeholder_shapes=with_data)
    parts.model, parts.leftover, parts.applied, problems = built[key]
    parts.add(problems)
    if parts.model is None:
        return
    if parts.loss is not None and isinstance(parts.loss.function, ActivationLoss):
        parts.add(parts.loss.function.problems(parts.model))
    if info is not None and info.tokenizer is not None:
        parts.add(unfit_tokens(parts.model, info.vocab_size, info.length))


BuiltModel = tuple[nn.Module | None, Mapping[str, Tensor], frozenset[str], list[Problem]]
"""The model with its weights, `leftover` and `applied` as in `Prepared`, and the mistakes in model and weights."""


def load_model(
    settings: Settings, info: DataInfo | None, trust: frozenset[str], *, placeholder_shapes: bool = True
) -> BuiltModel:
    """The model with its weights, or the mistakes in them.

    placeholder_shapes: if `info` is None, the model gets some shape, classes and vocabulary, on which names of modules
                        do not depend
    """
    defaults: dict[str, Any] = {"sample_shape": None, "num_classes": None}
    if info is not None:
        shape = info.inputs.shape if isinstance(info.inputs, data.TensorInfo) else None
        defaults = {
            "sample_shape": shape,
            "num_classes": info.num_classes,
            "vocab_size": info.vocab_size,
            "length": info.length,
        }
    elif placeholder_shapes:
        defaults = {"sample_shape": (3, 64, 64), "num_classes": 10, "vocab_size": 256, "length": 256}
    model = None
    try:
        with session(settings.compute, settings.seed):
            model = models.build(settings.model, trust=trust, **defaults)
        weights = settings.model.own_weights
        if weights is None:
            return model, {}, frozenset(), []
        leftover = models.load_weights(model, weights, settings.model.strip_prefix)
    except Refusal as error:
        return model, {}, frozenset(), error.errors
    return model, leftover, models.applied_hooks(weights), []


def own_code(task: Task, settings: Settings, loss: TrainLoss, metrics: Sequence[Metric]) -> dict[str, Code]:
    """Key path -> its code: what the task loads from a trusted package, and the task itself if an extension has it."""
    train = settings.train
    named = [
        ("model.factory", settings.model.factory, MODELS),
        ("data.factory", settings.data.factory, DATA),
        (COLLATE, settings.data.collate, COLLATES),
    ]
    if task.trains:
        named.append((f"{OPTIMIZER}.name", train.optimizer.name, OPTIMIZERS))
    if task.trains and train.scheduler is not None:
        named.append((f"{SCHEDULER}.name", train.scheduler.name, SCHEDULERS))
    scored = task.scored()
    if scored is not None:
        where, backward = scored
        named.append((f"{where.removesuffix('.score')}.score", backward.score, OWN_METRIC))
    code: dict[str, Code] = {}
    of_extension = code_of_class(type(task))
    if of_extension is not None:
        code["task.name"] = of_extension
    for where, name, kind in named:
        if name and ":" in name:
            code[where] = load(name, kind, where).code
    if loss.code is not None:
        code[LOSS] = loss.code
    for metric in metrics:
        if metric.code is not None:
            code[f"{METRICS}.{metric.name}"] = metric.code
    return code


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
