"""Checks before the run that the samples have the spans that clauses `tokens` name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from hookrun import data
from hookrun.data import Split
from hookrun.data.samples import Samples
from hookrun.errors import CompileError, Problem
from hookrun.spec import HookSpec, Settings
from hookrun.spec.tokens import Tokens

MOST_SAMPLES = 4_096
"""The number of samples that are checked before the run; a later sample without a span makes the run fail there."""


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
    count = min(samples, len(found), MOST_SAMPLES)
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
