"""What a plan needs of the weights file, of other runs' rows and of the samples, checked before the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hookrun import data
from hookrun.data import Split
from hookrun.data.info import DataInfo
from hookrun.data.tokens import AMBIGUOUS
from hookrun.engine.plan.plan import ResolvedPlan
from hookrun.engine.prove.trial import Plan
from hookrun.engine.spec.tokens import Tokens
from hookrun.engine.values.folding import labels_refused
from hookrun.errors import Problem, listed
from hookrun.run.experiment.run_values import Rows
from hookrun.run.experiment.settings import Settings

MOST_CHECKED = 4_096
"""The number of samples that are checked before the run; a later sample without a span makes the run fail there."""


def leftover_problems(plan: Plan, leftover: Mapping[str, Tensor]) -> Iterator[Problem]:
    """A problem if hooks do not add every tensor of the weights file that the model does not have."""
    added = {f"{owner}.{name}" if owner else name for owner, name in plan.added()}
    if unknown := sorted(set(leftover) - added):
        yield Problem(
            "model.weights",
            f"the file holds {len(unknown)} tensors that neither the model nor its hooks have: {listed(unknown, 8)}",
            "use the model and the hooks that the file was saved with, or save it without these",
        )


def row_problems(plan: ResolvedPlan, samples: int | None, *, trains: bool) -> Iterator[Problem]:
    """A problem for each value of another run that lacks the row of a sample which its hook will see.

    samples: the hooks see samples with ids below this; None: not known beforehand
    trains:  the hooks see training samples, then validation samples
    """
    if samples is None:
        return
    for hook in plan.hooks:
        for field, by_module in hook.values.items():
            where = f"{hook.spec.where}.{field}"
            for rows in {id(rows): rows for rows in by_module.values()}.values():  # each once
                if not isinstance(rows, Rows) or rows.draws:
                    continue
                if trains and hook.spec.keys.when.mode != "train":
                    yield Problem(
                        where,
                        "each training sample uses its own row, and validation samples have no rows",
                        "add when: {mode: train}",
                    )
                elif lack := rows.lacking(torch.arange(samples)):
                    yield Problem(
                        where, lack, "capture them in that run too, or limit this run: train.limit_batches"
                    )


def label_problems(plan: Plan, info: DataInfo) -> Iterator[Problem]:
    """A problem for each hook that needs the label of each sample, if the data has none, or more than it can hold."""
    target = info.target
    there = "no targets that are one tensor" if target is None else f"targets of another form, {target}"
    has_labels = target is not None and not target.shape and not target.dtype.is_floating_point
    for hook in plan.hooks:
        where = f"{hook.spec.where}.by"
        if not hook.spec.action.by_label:
            continue
        if not has_labels:
            what = f"the data set does not have a label for each sample: it has {there}"
            yield Problem(where, what, "leave `by` out, or use a data set of classes")
            continue
        if info.num_classes is None or hook.spec.keys.when.data is not None:  # which may choose a few labels
            continue
        for match in hook.matches:
            if match.held is not None:
                too_many = labels_refused(info.num_classes, *match.held)
                if too_many:
                    yield Problem(where, f"on {match.path or '(root)'}: {too_many}")


def missing_spans(
    clauses: Iterable[tuple[Tokens | None, str]], settings: Settings, split: Split, samples: int | None
) -> Iterator[Problem]:
    """A problem for each span that a sample lacks, or whose text it has more than once.

    clauses: (clause, the key path of its owner)
    samples: samples with ids below this are checked; None: nothing is checked
    """
    named: dict[tuple[str, str], None] = {}  # (span, key path of its owner), each once
    for clause, owner in clauses:
        if clause is not None and clause.missing == "error":
            for tokens in clause.filters:
                if tokens.span is not None:
                    named[tokens.span, owner] = None
    if not named or not samples:
        return
    rows = data.load(settings.data, split, seed=settings.seed)
    spans = rows.spans(torch.arange(min(samples, len(rows), MOST_CHECKED)))
    for name, owner in named:
        if name not in spans:
            continue
        first, end = spans[name].unbind(1)
        lacking = ((first < 0) | (end <= first)).nonzero()
        if not len(lacking):
            continue
        number = int(lacking[0])
        file = rows.file(number)
        sample = f"sample {number} ({file})" if file else f"sample {number}"
        if first[number] == AMBIGUOUS[0]:
            what = "has more than once the text of the"
            hint = "give token positions in the data: [first, end]"
        else:
            what = "has no"
            hint = "give it one, or leave such samples out: tokens: {span: …, missing: skip}"
        yield Problem(f"{owner}.tokens.span", f"{sample} of the split '{split}' {what} span {name!r}", hint)
