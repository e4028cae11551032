"""The predictions of two runs side by side: which changed, from what to what, and the KL divergence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookrun.data.info import SPLITS
from hookrun.store.captures.read import StoredCapture
from hookrun.store.comparison.records import StoredRun
from hookrun.store.comparison.rows import Pair, compared, positions_of

MOST_CHANGES = 1_000
"""The changed predictions that are listed; all are counted."""


def predictions(run: StoredRun, other: StoredRun, tolerance: float) -> dict[str, Any]:
    """How the predictions, or the generated texts, differ.

    compared:    the number of samples, or of tokens if each has a prediction; `changed`: how many have another one
    changes:     the first of these, from what to what
    kl:          the mean of KL(P || Q) in nats, P of the first run, Q of the other one; None: there are no scores
    relative_l2: of all outputs; `largest`: the largest difference of two outputs
    """
    here, there = _predicted(run), _predicted(other)
    common = [place for place in here if place in there]
    changes = [
        _change(*place, None, here[place], there[place]) for place in common if here[place] != there[place]
    ]
    found: dict[str, Any] = {"compared": len(common), "changed": len(changes), "kl": None}
    found |= {"relative_l2": None, "largest": None, "note": "", "differs": bool(changes)}
    outputs, others = _outputs(run), _outputs(other)
    if outputs is not None and others is not None:
        comparison = compared(outputs, others, run.samples.by_sample, tolerance)
        if (difference := comparison.by_token.get(None)) is not None:
            found |= {"relative_l2": difference.relative_l2, "largest": difference.largest}
            found["differs"] |= difference.first is not None
        found["note"] = "; ".join(comparison.notes)
        total = scored = 0.0
        for pair in comparison.pairs:
            for scores in _scores(run, pair, is_class=bool(common)):
                total, scored = total + float(scores.divergence.sum()), scored + len(scores.divergence)
                if not common:
                    found["compared"] += len(scores.divergence)
                    found["changed"] += len(scores.changes)
                    changes += scores.changes[: MOST_CHANGES - len(changes)]
        found["kl"] = total / scored if scored else None
    elif outputs is not None or others is not None:
        found["note"] = f"only {(other if outputs is None else run).path} has outputs"
    found["differs"] |= bool(found["note"] or found["changed"])
    return {**found, "changes": changes[:MOST_CHANGES]}


@dataclass(frozen=True)
class _Scores:
    """The scores of a block: KL of each sample or token [n], and the changed predictions of tokens."""

    divergence: Tensor
    changes: list[dict[str, Any]]


def _scores(run: StoredRun, pair: Pair, *, is_class: bool) -> Iterator[_Scores]:
    """The scores in blocks; nothing if the rows are neither scores of classes nor scores at each token.

    is_class: the run recorded a predicted class for each sample
    """
    positions = positions_of(pair, run.samples.by_sample)
    _, *shape = pair.rows.shape
    is_known = is_class and len(shape) == 1 if positions is None else len(shape) == 2
    if pair.other.shape != pair.rows.shape or not is_known or shape[-1] < 2:
        return
    capture, texts = pair.rows.capture, run.samples.texts
    samples, splits = (column[pair.rows.rows] for column in (capture.sample_ids, capture.splits))
    for place, rows, others in pair.blocks():
        changes = list[dict[str, Any]]()
        if positions is not None:
            at = positions[place]
            best, now = rows.double().argmax(-1), others.double().argmax(-1)
            for row, column in ((best != now) & (at >= 0)).nonzero().tolist():
                names = [
                    texts.get(token) or token for token in (int(best[row, column]), int(now[row, column]))
                ]
                split = SPLITS[int(splits[place][row])]
                changes.append(_change(split, int(samples[place][row]), int(at[row, column]), *names))
            rows, others = rows[at >= 0], others[at >= 0]
        logs, other_logs = (scores.double().log_softmax(-1) for scores in (rows, others))
        terms = torch.where(logs == -torch.inf, 0.0, logs.exp() * (logs - other_logs))
        yield _Scores(terms.sum(-1).clamp(min=0), changes)


def _change(split: str, sample: int, token: int | None, before: Any, now: Any) -> dict[str, Any]:
    return {"split": split, "sample": sample, "token": token, "run": before, "other": now}


def _predicted(run: StoredRun) -> dict[tuple[str, int], Any]:
    """(split, sample) -> the predicted class, or the text or the tokens that were generated."""
    classes = {
        place: line["predicted_class"]
        for place, line in run.samples.by_sample.items()
        if line.get("predicted_class") is not None
    }
    generated = {
        (line["split"], line["sample"]): line["ids"] if line["text"] is None else line["text"]
        for line in run.generations
    }
    return classes | generated


def _outputs(run: StoredRun) -> StoredCapture | None:
    """The model's main output, as for its loss; None if the run wrote none."""
    leaf = run.predictions
    if leaf is None or isinstance(leaf, StoredCapture):
        return leaf
    named = (leaf[path] for path in leaf for name in ("logits", "out") if path.strip(".") == name)
    return next(named, next(iter(leaf.values())))
