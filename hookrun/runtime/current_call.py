"""The state of the current firing at a site, separate for each thread, and the tokens that it belongs to."""

from __future__ import annotations

import re
from threading import local
from typing import Any

from torch import Tensor

from hookrun.runtime.checkpointing import NO_BACKWARD, graph_task
from hookrun.runtime.clock import Calls, Clock
from hookrun.runtime.tokens.choice import Chosen
from hookrun.runtime.tokens.passes import Pass

_CROSS_ATTENTION = re.compile(
    r"(^|\.)(EncDecAttention|encoder_attn|cross_?attention|cross_?attn)\.(.*\.)?(k|v|k_proj|v_proj|key|value)$",
    re.IGNORECASE,
)
"""Names in transformers of the modules of a decoder whose values belong to the encoder's tokens."""


class CurrentCall(local):
    """The state of the firing at a site in this thread.

    clock:   of the installation
    calls:   numbers the calls of the site's module; None: they are not numbered
    within:  path of the tensor that the hook is attached to, if a gradient hook is attached to several
    at:      path, below `within`, of the tensor that the action is given
    of_call: the number of the call that a gradient or a saved tensor belongs to; None: the module's current call
    of_pass: the pass over the tokens that a gradient belongs to; None: the current pass
    args:    the arguments of the module call, for actions that use them
    whole:   the whole tensor while the action is given a part of it, if it needs the whole
    chosen:  the positions that `tokens` selects
    """

    within = ""
    at = ""
    of_call: int | None = None
    of_pass: Pass | None = None
    args: tuple[Any, ...] = ()
    whole: Tensor | None = None
    chosen: Chosen | None = None

    def __init__(self, path: str, clock: Clock, calls: Calls | None = None) -> None:
        self.clock, self.calls = clock, calls
        self._sees_encoder = _CROSS_ATTENTION.search(path) is not None

    @property
    def model_tokens(self) -> Pass | None:
        """The pass over the tokens of the model, or of its decoder; None: not known."""
        if self.of_pass is not None or self.clock.passes is None:
            return self.of_pass
        # recomputation by activation checkpointing
        if self.calls is not None and graph_task() != NO_BACKWARD:
            return self.calls.now.tokens
        return self.clock.passes.current

    @property
    def tokens(self) -> Pass | None:
        """The pass whose tokens the value has: for cross-attention keys and values the encoder's; None: not known."""
        of_model = self.model_tokens
        return (
            of_model.encoder if self._sees_encoder and of_model is not None and of_model.encoder else of_model
        )
