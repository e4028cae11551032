"""The mistakes in `task.metrics` and `task.tokens` that can be found before a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from hookrun.data import DataInfo, Split, load
from hookrun.engine.plan.texts import FoundTokenizer, texts_of, unknown_spans
from hookrun.engine.spec.tokens import Tokens
from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.metrics.losses import NEXT_TOKEN_LOSSES, score_function
from hookrun.run.experiment.metrics.metrics import (
    CLASSES_NEEDED,
    KL,
    LOGIT_DIFFERENCE,
    LOSS,
    METRICS,
    OF_TOKENS,
    PERPLEXITY,
    PROBABILITY,
    RANK,
    WHERE,
    Metric,
)
from hookrun.run.experiment.metrics.predictions import predicted_rows
from hookrun.run.experiment.run_values import CaptureRows, RunReferences
from hookrun.run.experiment.settings import Settings, runs_of
from hookrun.run.experiment.task import Task, metric_tokens_of, metrics_of
from hookrun.run.experiment.task_keys import BackwardPass
from hookrun.store.objective import MetricKeys
from hookrun.store.reader import Run

TOKENS = "task.tokens"

_SAME = ("padding", "length", "seed", "val_fraction", "file", "tokenizer", "special_tokens")
"""Arguments of data that determine which sample has which number, and the position of each of its tokens."""

_MOST_READ = 64
"""How many floating-point targets are read to see whether all are 0 or 1."""

_OF_LABELS = {PERPLEXITY, PROBABILITY, RANK}

_ANSWERS = "use data=names, or data=prompts with the fields `answer` and `wrong`"


def metric_problems(task: Task, settings: Settings, info: DataInfo | None) -> Iterator[Problem]:
    """All mistakes; none are searched for if the data is invalid (info is None)."""
    if info is None:
        return
    for place, keys in enumerate(metrics_of(task) or ()):
        yield from _of_metric(keys, f"{WHERE}.{place}", settings, info)
    tokens = metric_tokens_of(task)
    if tokens is None:
        return
    if info.tokenizer is None:
        what = f"the samples of the data {info.name!r} are not sequences of tokens"
        yield Problem(TOKENS, what, "leave it out")
    else:
        yield from token_problems(tokens, info, FoundTokenizer(info.tokenizer), padding=False)


def over_split_problems(
    metrics: Iterable[Metric],
    passed: Mapping[Split, int | None],
    most: int,
    settings: Settings,
    info: DataInfo,
) -> Iterator[Problem]:
    """The mistakes in metrics over the whole split: no such split, too many rows, floating-point targets but 0 and 1.

    passed: split in which they are computed -> the number of its samples, None: not known
    most:   `task.max_rows`

    Raises SpecError if floating-point targets cannot be read.
    """
    over_split = [metric for metric in metrics if metric.over is not None]
    if not over_split:
        return
    first = over_split[0]
    count = sum(samples or 0 for samples in passed.values())
    if set(passed.values()) == {0}:
        split = next(iter(passed))
        what = f"{first.name!r} is computed over the split '{split}', which {info.name!r} does not have"
        yield Problem(first.where, what, "leave it out")
    yield from too_many_rows(first, count, most)
    of_classes = [metric for metric in over_split if metric.needs == CLASSES_NEEDED]
    if not of_classes or not count or info.target is None or not info.target.dtype.is_floating_point:
        return
    samples = load(settings.data, next(iter(passed)), seed=settings.seed)
    values = set[float]()
    for number in range(min(_MOST_READ, len(samples))):
        _, target = samples[number]
        values.update(target.flatten().tolist())
    if not values - {0, 1}:
        return
    largest = max(values - {0, 1})
    for metric in of_classes:
        what = (
            f"needs labels, or targets 0 and 1; {info.name!r} has targets {info.target} such as {largest:g}"
        )
        yield Problem(metric.where, f"{metric.name!r} {what}", "use r2 or spearman")


def too_many_rows(metric: Metric, rows: int, most: int) -> Iterator[Problem]:
    """A problem if a metric over the whole split would keep more rows than allowed."""
    if rows > most:
        yield Problem(
            "task.max_rows",
            f"{metric.name!r} is computed from the scores of {rows:,} rows, and {most:,} are allowed",
            f"limit the run by train.limit_batches, or allow more: task.max_rows={rows}",
        )


def compared_runs(settings: Settings) -> dict[str, str]:
    """Key path -> name of each run with whose predictions the task compares its own."""
    return {where: name for where, name in runs_of(settings).items() if where.endswith(".against.run")}


def compared_problems(
    experiment: Experiment, splits: Mapping[Split, int | None], info: DataInfo
) -> Iterator[Problem]:
    """The mistakes in the runs with which the task compares; runs that are still to be made are not checked.

    splits: split of the task -> the number of its samples, None: not known
    info:   the data of this run
    """
    runs = RunReferences.of(experiment)
    shape = _least_shape(experiment.settings, info)
    for where, name in compared_runs(experiment.settings).items():
        try:
            run = runs.open(name)
            if run is None:
                continue
            yield from _other_data(where, run, experiment.settings)
            for split, count in splits.items():
                yield from _other_scores(where, predicted_rows(run, split), shape, count)
        except HookrunError as error:
            yield Problem(where, str(error))


def _least_shape(settings: Settings, info: DataInfo) -> tuple[int | None, ...]:
    """The smallest shape of a sample's scores, (classes,) or (tokens, classes); None: a size that is not known.

    A model may have more classes than its data: pretrained weights, or a padded vocabulary.
    """
    if info.tokenizer is None:
        return (info.num_classes,)
    if settings.data.args.get("padding") == "none" or info.target is None:
        return (None, info.vocab_size)
    return (info.target.shape[0], info.vocab_size)


def _other_scores(
    where: str, rows: CaptureRows, shape: tuple[int | None, ...], count: int | None
) -> Iterator[Problem]:
    """Why the scores of the other run cannot be compared with those of `count` samples of this shape."""
    theirs = list(rows.shape)
    classes = shape[-1]
    has_length = len(shape) == 1 or shape[0] in (None, *theirs[:1])
    if classes is not None and theirs and theirs[-1] < classes:
        yield Problem(
            where,
            f"its scores have {theirs[-1]} classes or tokens, and the data has {classes}",
            "compare models of the same data",
        )
    elif len(theirs) != len(shape) or not has_length:
        sizes = ", ".join("?" if size is None else str(size) for size in shape)
        yield Problem(
            where,
            f"its scores of a sample have shape {theirs}, those of this run [{sizes}]",
            "compare runs whose samples have the same length",
        )
    elif count is not None and (lack := rows.lacking(torch.arange(count))):
        hint = "predict them in that run too, or limit this run: train.limit_batches"
        yield Problem(where, lack, hint)


def _other_data(where: str, run: Run, settings: Settings) -> Iterator[Problem]:
    """Why samples cannot be matched by their numbers, and tokens by their positions, with those of the other run."""
    data = run.config.get("data")
    if not isinstance(data, dict) or not data:
        yield Problem(
            where,
            f"the run {run.path} has no saved configuration, so it is not known whether its samples are the same",
            "run it again without hydra.output_subdir=null",
        )
        return
    if data.get("name") != settings.data.name:
        yield Problem(
            where,
            f"the run {run.path} used the data {data.get('name')!r}, and this run uses {settings.data.name!r}",
            "compare with a run on the same data",
        )
        return
    theirs = data.get("args") or {}
    ours = settings.data.args
    if not isinstance(theirs, dict):
        return
    for key in _SAME:
        if theirs.get(key) != ours.get(key):
            yield Problem(
                where,
                f"data.args.{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here",
                "use the same value in both runs",
            )


def _of_metric(keys: MetricKeys, where: str, settings: Settings, info: DataInfo) -> Iterator[Problem]:
    name = keys.name
    where_by = f"{where}.by"
    data = f"the data {info.name!r}"
    target = info.target
    if target is None and name in METRICS and name not in (LOSS, KL):
        yield Problem(WHERE, f"{name!r} needs targets, and {data} has none", "leave it out, or name a target")
    elif target is not None and name in _OF_LABELS and target.dtype.is_floating_point:
        yield Problem(where, f"{name!r} needs labels, and {data} has targets {target}", "leave it out")
    if name == LOGIT_DIFFERENCE and target is not None and not info.has_wrong:
        what = f"'{name}' needs a right and a wrong answer for each sample, and {data} does not have them"
        yield Problem(where, what, _ANSWERS)
    if keys.by == "sample" and not info.has_target_of_sample:
        yield Problem(
            where_by,
            f"the batches of {data} have no target for each sample, as data.collate and data.batch_size make them",
            "leave it out, or return one row of targets for each sample",
        )
    if keys.by == "position" and info.tokenizer is None:
        what = f"the samples of {data} are not sequences of tokens, so they have no positions"
        yield Problem(where_by, what, "use by: sample")
    elif keys.by == "position" and name not in OF_TOKENS:
        what = f"{name!r} is computed for a whole batch, not for each token"
        yield Problem(where_by, what, "use by: sample")
    if name != LOSS or keys.by is None or settings.train.loss is None:
        return
    loss = settings.train.loss.name
    if loss == "output":
        yield Problem(
            where_by,
            "with train.loss=output the model returns one number for the batch",
            "use another train.loss, or the metric perplexity",
        )
    elif info.tokenizer is not None and loss not in NEXT_TOKEN_LOSSES:
        yield Problem(
            where_by,
            f"train.loss={loss} is not computed token by token",
            "use train.loss=cross_entropy, or the metric perplexity",
        )


def token_problems(
    tokens: Tokens, info: DataInfo, tokenizer: FoundTokenizer, *, padding: bool
) -> Iterator[Problem]:
    """The problems of `task.tokens`.

    padding: of the residual stream, where it may select tokens of padding; otherwise of the output
    """
    selects = {
        "query and key": tokens.on_pattern,
        "dim": tokens.dim,
        "padding": tokens.padding and not padding,
    }
    wrong = [key for key, is_used in selects.items() if is_used]
    if wrong:
        reads = "metrics are computed at tokens of the model's output that are not padding"
        if padding:
            reads = "the residual stream has one dimension of tokens"
        hint = "name positions, as in -1, or {id: …}, {text: …}, {span: …}"
        yield Problem(TOKENS, f"found {wrong[0]}: {reads}", hint)
    elif tokens.phase == "generation":
        yield Problem(
            f"{TOKENS}.phase",
            "found phase: generation, and this task does not generate tokens",
            "use task=generate, or leave it out",
        )
    else:
        yield from unknown_spans(tokens, "task", info)
        yield from texts_of(tokens, "task", tokenizer)[1]


def score_problems(where: str, backward: BackwardPass, info: DataInfo | None) -> Iterator[Problem]:
    """The problems of a score: data without what it needs, or a function that cannot be loaded.

    where: the key path of the section
    info:  None if the data is invalid
    """
    where = f"{where}.score"
    if backward.is_own:
        try:
            score_function(backward.score, where)
        except SpecError as error:
            yield from error.errors
    if info is None:
        return
    target = info.target
    of_tokens = info.tokenizer is not None
    is_label = target is not None and not target.dtype.is_floating_point and (of_tokens or not target.shape)
    if backward.score == LOGIT_DIFFERENCE and not (of_tokens and info.has_wrong):
        what = f"{backward.score!r} needs a right and a wrong answer, and the data {info.name!r} does not have them"
        yield Problem(where, what, _ANSWERS)
    elif backward.score == "label" and not is_label:
        has = "has no targets" if target is None else f"has targets {target}"
        what = f"'label' needs a class label of each sample, and the data {info.name!r} {has}"
        yield Problem(where, what, "use top, class, output or loss")
