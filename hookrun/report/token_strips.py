"""Token strips: the tokens of the first samples, coloured by what was captured or predicted at each."""

from __future__ import annotations

import math

import torch

from hookrun.report.draw.charts import Figure
from hookrun.report.draw.strips import Strip, strips
from hookrun.report.draw.text import number
from hookrun.report.facts import Facts
from hookrun.report.sampling import CapturedRows, rows_of_samples
from hookrun.report.sequences import Sequence
from hookrun.store.captures import StoredCapture

MOST_SAMPLES = 4
MOST_TOKENS = 192
"""The largest number of tokens of one sample."""


def strips_of_capture(capture: StoredCapture, facts: Facts) -> list[Figure]:
    """Strips of a capture with `tokens`: its value at each token, or the norm of its values; none for other captures.

    Raises HookrunError for a shard that can't be read.
    """
    found = list[Strip]()
    for rows in rows_of_samples(capture, MOST_SAMPLES, facts.sequences, MOST_TOKENS):
        if not rows.by_token or (rows.keys >= 0).any() or not rows.values[0].numel():
            return []
        found.append(_of_values(rows, facts))
    if max((len(each.tokens) for each in found), default=0) < 2:
        return []
    is_one = found and torch.Size(capture.shape[1:]).numel() == 1
    what = "value" if is_one else "norm"
    note = "each token has the colour of " + ("the value" if is_one else "the norm of the values") + " there"
    return [
        strips(
            f"{what} at each token",
            found,
            what=what,
            note=note,
            ends=("low", "high") if is_one else ("small", "large"),
        )
    ]


def _of_values(rows: CapturedRows, facts: Facts) -> Strip:
    flat = rows.values.reshape(len(rows.values), -1)
    values = flat[:, 0] if flat.shape[1] == 1 else torch.linalg.vector_norm(flat, dim=1)
    ids = rows.token_ids.tolist()
    names = [facts.texts.get(each) or (f"#{each}" if each >= 0 else "?") for each in ids]
    return Strip(rows.name, names, rows.positions.tolist(), values.tolist())


def strips_of_predictions(capture: StoredCapture, facts: Facts) -> list[Figure]:
    """Strips of logits [tokens, vocabulary]: loss and probability of the target at each token; none for others.

    Raises HookrunError for a shard that can't be read.
    """
    shape = capture.shape[1:]
    if len(shape) != 2 or facts.has_encoder or not facts.sequences:
        return []
    losses, chances = list[Strip](), list[Strip]()
    for rows in rows_of_samples(capture, MOST_SAMPLES, facts.sequences, 1):
        sequence = facts.sequences.get(rows.sample)
        if sequence is None or shape[0] != sequence.width or not _fit(sequence, shape[1]):
            continue
        scores = rows.values[0][sequence.before :][: len(sequence.ids)][:MOST_TOKENS]
        if found := _logs(scores, sequence):
            losses.append(_of_targets(rows, sequence, {place: -log for place, log in found.items()}))
            chances.append(
                _of_targets(rows, sequence, {place: math.exp(log) for place, log in found.items()})
            )
    if not losses:
        return []
    note = "of the target at each token, for language models the next token; tokens without a target have no colour"
    return [
        strips(
            "loss at each token",
            losses,
            what="loss",
            note=f"the loss {note}",
            ends=("expected", "surprising"),
            heads=("target",),
        ),
        strips(
            "probability at each token",
            chances,
            what="probability",
            note=f"the probability {note}",
            ends=("unlikely", "likely"),
            heads=("target",),
        ),
    ]


def _fit(sequence: Sequence, vocabulary: int) -> bool:
    return all(each is None or each < vocabulary for each in sequence.targets)


def _logs(scores: torch.Tensor, sequence: Sequence) -> dict[int, float]:
    """Position -> the logarithm of the target's probability, for positions with a target."""
    places = [place for place, each in enumerate(sequence.targets[: len(scores)]) if each is not None]
    if not places:
        return {}
    targets = torch.tensor([sequence.targets[place] for place in places])
    logs = scores[places].double().log_softmax(-1)
    return dict(zip(places, logs[torch.arange(len(places)), targets].tolist(), strict=True))


def _of_targets(rows: CapturedRows, sequence: Sequence, values: dict[int, float]) -> Strip:
    shown = min(len(sequence.ids), MOST_TOKENS)
    targets = [sequence.name(each) if each is not None else number(None) for each in sequence.targets[:shown]]
    return Strip(
        rows.name,
        sequence.names[:shown],
        range(shown),
        [values.get(place) for place in range(shown)],
        [(each,) for each in targets],
    )
