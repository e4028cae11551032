"""What belongs to the firing under way at a site, in each thread for itself."""

from __future__ import annotations

import re
from threading import local
from typing import Any

from torch import Tensor

from hookrun.runtime.checkpointing import NO_BACKWARD, graph_task
from hookrun.runtime.clock import Calls, Clock
from hookrun.runtime.tokens.choice import Chosen
from hookrun.runtime.tokens.passes import Pass


class FiringState(local):
    """What belongs to the firing under way in one thread; see `PlacedHook`."""

    within = ""
    at = ""
    of_call: int | None = None
    of_pass: Pass | None = None
    args: tuple[Any, ...] = ()
    whole: Tensor | None = None
    chosen: Chosen | None = None


_CROSS_ATTENTION = re.compile(
    r"(^|\.)(EncDecAttention|encoder_attn|cross_?attention|cross_?attn)\.(.*\.)?(k|v|k_proj|v_proj|key|value)$",
    re.IGNORECASE,
)
"""Modules of a decoder whose values are of the encoder's tokens, as transformers calls them."""


class TokensNow:
    """The tokens that the firing under way at a site is about.

    path:  of the site's module
    calls: numbers the calls of the site's module; None: nobody asks
    """

    def __init__(self, path: str, firing: FiringState, clock: Clock) -> None:
        self.calls: Calls | None = None
        self._sees_encoder = _CROSS_ATTENTION.search(path) is not None
        self._firing, self._clock = firing, clock

    @property
    def of(self) -> Pass | None:
        """The pass that the firing belongs to; None: nothing says which tokens it computes."""
        found = self.under_way
        return found.encoder if self._sees_encoder and found is not None and found.encoder else found

    @property
    def under_way(self) -> Pass | None:
        """That of the model's own tokens, or of its decoder's."""
        of_gradient, passes = self._firing.of_pass, self._clock.passes
        if of_gradient is not None or passes is None:
            return of_gradient
        if self.calls is not None and graph_task() != NO_BACKWARD:  # activation checkpointing repeats a call
            return self.calls.now.tokens
        return passes.current

    @property
    def samples(self) -> Tensor | None:
        """The numbers of the samples in the batch under way, [n] int64; None: not known."""
        return self._clock.samples

    def note(self, chosen: Chosen) -> None:
        """The positions that the firing is about."""
        self._firing.chosen = chosen
