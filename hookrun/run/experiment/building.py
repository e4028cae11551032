"""Builds what an experiment names: data, model with its weights, loss and metrics. Reads no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hookrun import data, models
from hookrun.data import DataInfo, Split
from hookrun.data.collate import WHERE as COLLATE
from hookrun.engine.plan.model_tree import unhookable_model
from hookrun.engine.trust.callables import Code
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
