"""What a hook accumulates over the whole run at one module: which samples, tokens and labels its rows belong to."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from hookrun.engine.actions.base import TokenRows
from hookrun.engine.plan.table import size
from hookrun.engine.runtime.site_records import SiteRecords
from hookrun.engine.values.containers import readable
from hookrun.engine.values.folding import MOST_BYTES, Folding, SeenRows, keys_of, most_labels

_CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)


class SiteFolds(SiteRecords):
    """The fold at one module; see actions/base.py.

    fold: what it has accumulated; None: the action accumulates nothing
    """

    fold: Folding | None = None
    _folded: str | None = None
    _last_call: int | None = None
    _channels: tuple[Any, tuple[int, str]] | None = None

    def register_fold(self, folding: Folding) -> None:
        self.fold = folding

    def channels(self, rows: Tensor, dim: int | None) -> tuple[int, str]:
        form = (self.current.path, rows.shape)
        if self._channels is None or self._channels[0] != form:
            self._channels = form, self._channels_of(rows, dim)
        return self._channels[1]

    def _channels_of(self, rows: Tensor, dim: int | None) -> tuple[int, str]:
        of_tokens = () if self.part is None else self.part.token_dims
        batch = self.batch.of(self.current.path) or 0
        dims = rows.dim() + len(of_tokens)
        order = [batch, *(place for place in range(dims) if place != batch)]
        taken = [0, *(place % dims for place in of_tokens)]
        others = [order[place] for place in range(dims) if place not in taken]  # as the module has them
        is_taken = False
        if dim is not None:
            found = [place for place in others if place in (dim, dim + dims)]
        elif len(others) == 2 or (of_tokens and len(others) > 2):
            found = []
        elif len(others) > 2 and self._is_of_torch(_CHANNELS_LAST):
            found = others[-1:]
        else:
            found = others[:1]
            is_taken = len(others) > 2 and not self._is_of_torch(_CHANNELS_FIRST)
        shape = list(rows.shape) if of_tokens else list(rows.movedim(0, batch).shape)
        if not found:
            could = " or ".join(map(str, others)) or "none (use per: element)"
            hint = ""
            wrong = ""
            if len(others) == 2 and not of_tokens:
                hint = "; for a sequence write tokens: all"
            if dim is not None:
                wrong = f"dim: {dim} cannot have channels: "
            raise ValueError(
                f"{wrong}the dimension `dim` of channels of a value {shape} may be {could}{hint}"
            )
        row_dim = others.index(found[0]) + 1
        text = f"of {shape}"
        if of_tokens:
            text = f"of a sequence, {rows.shape[row_dim]} for each token"
        if is_taken:
            text += f" is taken, since {type(self.module).__name__} does not show which one it is (`dim` names another)"
        return row_dim, f"channels: dimension {found[0]} {text}"

    def _is_of_torch(self, kinds: tuple[type[nn.Module], ...]) -> bool:
        """Whether the module is one of these kinds as torch has it, and the hook sees its value whole."""
        keys = self.spec.keys
        is_whole = keys.index is None and keys.heads is None
        is_of_torch = type(self.module).__module__.startswith("torch.")
        return is_whole and is_of_torch and isinstance(self.module, kinds)

    def accumulate(self, values: Tensor, units: Sequence[int], places: Sequence[int], text: str) -> None:
        assert self.fold is not None
        needed = self.fold.wanted.size(prod(units))
        if needed > MOST_BYTES:
            raise ValueError(
                f"it would hold {size(needed)} for {prod(units):,} units, at most {size(MOST_BYTES)}: select some of "
                "them by `index`, or ask for less in `of`"
            )
        path = self.current.path
        if self._folded not in (None, path):
            raise ValueError("the value holds several tensors: name one with `target`")
        self._folded = path
        if not self.has_values:
            held = f"holds {size(needed)}"
            if self.spec.action.by_label:
                held += f" for each label, at most {most_labels(needed):,} labels"
            self.sink.note(self, f"{text}; {held}", (prod(units), needed))
            return
        plain = readable(values)
        if plain is None or self.is_uncounted or self.clock.is_dummy_pass or not values.numel():
            return  # without data the model is being traced
        if plain is not values:
            raise ValueError("it cannot accumulate inside a transform of torch.func: fold outside of it")
        tokens = self._tokens_seen()
        positions = None if tokens is None else tokens.positions
        samples = self._samples_seen(len(values)) if tokens is None else tokens.numbers
        labels = self._labels_seen(len(values), tokens) if self.spec.action.by_label else None
        seen = SeenRows(values, keys_of(samples, self.sink.split), positions)
        self.fold.add(seen, units, places, labels)

    def _tokens_seen(self) -> TokenRows | None:
        """Under `tokens` the token of each row that the action is given."""
        current = self.current
        if self.spec.keys.tokens is None or current.chosen is None:
            return None
        rows = current.chosen.rows
        return rows if current.matching is None else rows.at(current.matching)

    def _samples_seen(self, count: int) -> Tensor:
        """[R] int64: the number of the sample of each row."""
        matching = self.current.matching
        samples = self.clock.samples
        if samples is None:
            samples = self.sink.counted
        if samples is None:
            if matching is not None:
                raise ValueError(
                    "it is not known which samples these are: set hooks.samples before each batch"
                )
            samples = self._numbered(count)
        elif matching is None and len(samples) != count:
            raise ValueError(f"the value has {count} rows, and the batch has {len(samples)} samples")
        return samples if matching is None else samples[matching]

    def _numbered(self, count: int) -> Tensor:
        """The numbers of rows that nobody has numbered: on from those of the last forward.

        The calls of a module in a forward see the same rows; a backward pass comes to the last one first.
        """
        assert self.fold is not None
        last = self._last_call
        self._last_call = self.call
        if last is None or (self.call <= last if self.hook_type.phase == "forward" else self.call >= last):
            self.fold.rows += count
        return torch.from_numpy(np.arange(self.fold.rows - count, self.fold.rows))

    def _labels_seen(self, count: int, tokens: TokenRows | None) -> Tensor:
        """[R] int64: the label of the sample of each row."""
        places = self.current.matching
        if tokens is not None:
            places = tokens.samples
        if places is None:
            places = torch.arange(count, device="cpu")
        labels = self.clock.labels
        if labels is None or len(labels) <= int(places.max()):
            raise ValueError(
                "by: label: the batch does not have a label for each sample; in a loop of your own set hooks.labels "
                "before each batch"
            )
        return labels[places]
