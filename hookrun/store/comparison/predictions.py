"""The predictions of two runs side by side: which changed, from what to what, and the KL divergence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookrun.data.info import SPLITS
from hookrun.store.captures.read import Leaf, SampleTable, StoredCapture
from hookrun.store.comparison.rows import Pair, compared, positions_of

MOST_CHANGES = 1_000
"""The changed predictions that are listed; all are counted."""

Predicted = Mapping[tuple[str, int], Any]
"""(split, sample) -> the predicted class, or the text that was generated."""


def predicted(samples: SampleTable, generations: list[dict[str, Any]]) -> Predicted:
    """The prediction of each sample that has one."""
    classes = {place: line.get("predicted_class") for place, line in samples.by_sample.items()}
    texts = {(line["split"], line["sample"]): line["text"] or str(line["ids"]) for line in generations}
    return {place: each for place, each in {**classes, **texts}.items() if each is not None}


def predictions(
    here: Predicted,
    there: Predicted,
    outputs: Leaf | None,
    others: Leaf | None,
    samples: SampleTable,
    tolerance: float,
) -> dict[str, Any]:
    """How the predictions of two runs, and the outputs that they wrote, differ.

    compared:    the number of samples, or of tokens if each has a prediction; `changed`: how many have another one
    changes:     the first of these, from what to what
    kl:          the mean of KL(P || Q) in nats, P of the first run, Q of the other one; None: there are no scores
    relative_l2: of all outputs; `largest`: the largest difference of two outputs
    """
    common = [place for place in here if place in there]
    changes = [
        _change(*place, None, here[place], there[place]) for place in common if here[place] != there[place]
    ]
    found: dict[str, Any] = {
        "compared": len(common),
        "kl": None,
        "relative_l2": None,
        "largest": None,
        "note": "",
    }
    differs = bool(changes)
    if outputs is not None and others is not None:
        comparison = compared(_main(outputs), _main(others), samples.by_sample, tolerance)
        if (difference := comparison.by_token.get(-1)) is not None:
            found |= {"relative_l2": difference.relative_l2, "largest": difference.largest}
            differs |= difference.first is not None
        found["note"] = "; ".join(comparison.notes)
        total = count = 0.0
        for pair in comparison.pairs:
            divergences, of_tokens = _scores(pair, samples, is_class=bool(common))
            total, count = total + float(sum(divergences)), count + len(divergences)
            changes += of_tokens
        found["kl"] = total / count if count else None
        found["compared"] = len(common) or int(count)
    elif outputs is not None or others is not None:
        found["note"] = "only one of the runs wrote its outputs"
    differs |= bool(changes or found["note"])
    return {**found, "changed": len(changes), "differs": differs, "changes": changes[:MOST_CHANGES]}


def _scores(pair: Pair, samples: SampleTable, *, is_class: bool) -> tuple[list[float], list[dict[str, Any]]]:
    """KL of each sample or token, and the changed predictions of tokens; none if the rows are no scores of classes.

    is_class: a predicted class was recorded for each sample
    """
    rows, (_, *shape) = pair.rows, pair.rows.shape
    positions = positions_of(rows, samples.by_sample)
    is_known = is_class and len(shape) == 1 if positions is None else len(shape) == 2
    divergences, changes = list[float](), list[dict[str, Any]]()
    for place in pair.places() if is_known and pair.other.shape == rows.shape and shape[-1] > 1 else ():
        logs, others = (side[place].double().log_softmax(-1) for side in (pair.rows, pair.other))
        if positions is not None:
            at = positions[place]
            best, now = logs.argmax(-1), others.argmax(-1)
            for row, column in ((best != now) & (at >= 0)).nonzero().tolist():
                number = int(rows.rows[place][row])
                split, sample = int(rows.capture.split_numbers[number]), int(rows.capture.sample_ids[number])
                tokens = int(best[row, column]), int(now[row, column])
                names = [samples.texts.get(token) or token for token in tokens]
                changes.append(_change(SPLITS[split], sample, int(at[row, column]), *names))
            logs, others = logs[at >= 0], others[at >= 0]
        terms = torch.where(logs == -torch.inf, 0.0, logs.exp() * (logs - others))
        divergences += terms.sum(-1).clamp(min=0).tolist()
    return divergences, changes


def _change(split: str, sample: int, token: int | None, before: Any, now: Any) -> dict[str, Any]:
    return {"split": split, "sample": sample, "token": token, "run": before, "other": now}


def _main(leaf: Leaf) -> StoredCapture:
    """The model's main output, as for its loss."""
    if isinstance(leaf, StoredCapture):
        return leaf
    named = (leaf[path] for name in ("logits", "out") for path in leaf if path.strip(".") == name)
    return next(named, next(iter(leaf.values())))
