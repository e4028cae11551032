"""Writes samples.jsonl: each sample of a pass with its class, prediction and loss; and small pictures of some."""

from __future__ import annotations

import base64
import heapq
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from hookrun.data import Split
from hookrun.data.samples import IGNORED
from hookrun.engine.runtime.tokens.calls import IDS, MASK
from hookrun.engine.values.tensors import read_together
from hookrun.run.experiment.metrics.output import OutputReader
from hookrun.run.passes.batches import Batch, Batches
from hookrun.store.format import SAMPLES
from hookrun.store.run_dir import RunDir

MOST_WORST = 16
"""How many samples with the highest loss get a picture."""
MOST_FIRST = 8
"""How many first samples of each split get a picture too."""
MOST_TOKENS = 2**18
"""The largest number of tokens of a split, padding included, that are written: the tokens of its first samples."""


@dataclass(eq=False)
class SampleNames:
    """Writes the file, the class, the predicted class and the loss of each sample.

    The class is written if each sample has a label. The predicted class and the cross-entropy of the label are written
    if the output has one score for each class. For the first sequences of tokens, tokens and targets are written too;
    pictures use them to label their axes.

    has_labels: each sample has a target, which may be a label
    log_texts: called with the tokens that were written; None: their texts are not recorded
    seen:      split -> how many of its samples were written
    """

    run_dir: RunDir
    parts: Mapping[Split, Batches]
    reader: OutputReader
    has_labels: bool = True
    log_texts: Callable[[list[int]], None] | None = None
    seen: Counter[str] = field(default_factory=Counter, init=False)
    _worst: list[tuple[float, str, int]] = field(default_factory=list, init=False)

    def write(self, batch: Batch, output: Any) -> None:
        """Write the samples of a batch; `output` is the model's output for it."""
        samples = batch.data
        split = batch.split
        columns = dict[str, list[Any]]()
        if self.has_labels and len(batch.targets) == len(batch.ids):
            columns = self._classes(batch.targets, output)
        losses = columns.pop("loss", None)
        self.seen[split] += batch.whole
        tokens = self._tokens(batch) if samples.of_tokens else {}
        lines: list[dict[str, Any]] = []
        for row, number in enumerate(batch.ids.tolist()):
            line: dict[str, Any] = {"split": split, "sample": number, "file": samples.file(number)}
            for name, labels in columns.items():
                line[name] = samples.class_name(labels[row])
            if losses is not None and math.isfinite(losses[row]):
                line["loss"] = losses[row]
                self._worst.append((losses[row], split, number))
            line.update(tokens.get(row, {}))
            lines.append(line)
        self._worst = heapq.nlargest(MOST_WORST, self._worst)
        self.run_dir.append(SAMPLES, lines)

    def _classes(self, target: Tensor, output: Any) -> dict[str, list[Any]]:
        """`class`, `predicted_class` (with the largest score) and `loss` (cross-entropy) of each sample of a batch.

        Empty if the targets are not labels; without the last two if the output has no scores [B, classes]; the losses
        are NaN if a label is not one of these classes.
        """
        if target.dim() != 1 or target.is_floating_point() or target.is_complex():
            return {}
        named = self.reader.named(output)
        if (place := self.reader.place(named, target, "scores")) is None:
            return {"class": target.tolist()}
        scores = place.of(named).detach()
        if scores.dim() == 1:  # those of the one sample of a batch that is not stacked
            scores = scores[None]
        if self.reader.classes not in (None, scores.shape[1]):  # it may be an embedding
            return {"class": target.tolist()}
        labels = target.to(torch.int64)
        allowed = labels.clamp(0, scores.shape[1] - 1)
        losses = F.cross_entropy(scores.float(), allowed, reduction="none")
        losses = losses.masked_fill((allowed != labels).any(), math.nan)
        classes, predicted, losses = read_together([target, scores.argmax(1), losses])
        return {"class": classes.tolist(), "predicted_class": predicted.tolist(), "loss": losses.tolist()}

    def _worst_of_all(self) -> list[tuple[float, str, int]]:
        """(loss, split, number) of the samples with the highest loss on all ranks, in descending order; all call it."""
        of_ranks = self.run_dir.ranks.gathered(self._worst)
        return heapq.nlargest(MOST_WORST, set(chain.from_iterable(of_ranks)))

    def write_pictures(self, more: Iterable[tuple[str, int]] = ()) -> None:
        """Write small pictures of the samples with the highest loss and of some others, after a pass.

        Every rank calls it, and rank 0 writes.

        more: split and number of other samples
        """
        wanted = {(split, number) for _, split, number in self._worst_of_all()}
        wanted.update(more)
        if not self.run_dir.ranks.is_main:
            return
        for split, count in self.seen.items():
            in_report = [part * (count - 1) // 3 for part in range(4)]
            wanted.update((split, number) for number in (*range(min(count, MOST_FIRST)), *in_report))
        lines: list[dict[str, Any]] = []
        for split, number in sorted(wanted):
            batches = self.parts.get(cast(Split, split))
            if batches is None or batches.data.of_tokens or not 0 <= number < batches.samples:
                continue
            sample: Any = batches.data[number]
            picture = picture_of(sample[0]) if isinstance(sample, tuple) else None
            if picture is None:
                break  # then the other samples are not images either
            lines.append({"split": split, "sample": number, "png": picture})
        if lines:
            self.run_dir.write_pictures(lines)

    def state_dict(self) -> dict[str, Any]:
        """The counts and the samples with the highest loss so far, on all ranks; every rank calls it."""
        return {"seen": dict(self.seen), "worst": self._worst_of_all()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace these by saved ones."""
        self.seen = Counter(state["seen"])
        self._worst = [(float(loss), str(split), int(number)) for loss, split, number in state["worst"]]

    def _tokens(self, batch: Batch) -> dict[int, dict[str, Any]]:
        """Row -> the sample's tokens without padding, the padding, and the target of each token (None: no target).

        Only the first samples have an entry; this depends only on their numbers, so a resumed run writes the same.
        """
        inputs: Any = batch.inputs
        ids, mask, target = read_together([inputs[IDS], inputs[MASK], batch.target])
        length = ids.shape[1]
        is_first = batch.ids < MOST_TOKENS // max(length, 1)
        lines: dict[int, dict[str, Any]] = {}
        written: list[int] = []
        for row in is_first.nonzero().squeeze(1).tolist():
            columns = mask[row].nonzero().squeeze(1).tolist()
            if not columns:
                continue
            start = columns[0]
            end = columns[-1] + 1
            tokens = ids[row, start:end].tolist()
            targets = target[row, start:end].tolist()
            lines[row] = {
                "tokens": tokens,
                "padding": [start, length - end],
                "targets": [None if token == IGNORED else token for token in targets],
            }
            written += tokens
            written += [token for token in targets if token != IGNORED]
        if self.log_texts is not None:
            self.log_texts(written)
        return lines


MOST_SIDE = 64
"""The largest side in pixels; a larger picture is downsampled by averaging."""
LARGEST = 2**26
"""The largest number of elements of a sample from which a picture is made."""


def picture_of(value: object) -> str | None:
    """A sample [H, W], [1, H, W] or [3, H, W] as a PNG in base64; None if it is not an image.

    Its smallest value becomes black (0), its largest white (255).
    """
    if not isinstance(value, Tensor) or value.is_complex() or not 0 < value.numel() <= LARGEST:
        return None
    image = value.detach().cpu().float()
    if image.dim() == 2:
        image = image[None]
    if image.dim() != 3:
        return None
    channels, height, width = image.shape
    if channels not in (1, 3) or min(height, width) < 2:
        return None
    image = image.nan_to_num(0.0, 0.0, 0.0)
    block = -(-max(height, width) // MOST_SIDE)
    if block > 1:
        image = F.avg_pool2d(image, block, ceil_mode=True)
    low, high = image.aminmax()
    share = (image - low) / (high - low).clamp(min=1e-12)
    pixels = (share * 255).round().to(torch.uint8)
    pixels = pixels[0] if channels == 1 else pixels.permute(1, 2, 0).contiguous()
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")
