"""lm-evaluation-harness: importing this module registers the model `hookrun`, which has the hooks of a bundle.

`python -m hookrun.integrations.lm_eval` is the harness's own command with it:
`--model hookrun --model_args pretrained=PATH,bundle=OUT`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hookrun.integrations import needing

with needing("lm_eval", "lm_eval", __name__):
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models import huggingface

from torch import Tensor, ones_like

from hookrun.engine.runtime import Installation
from hookrun.errors import HookrunError
from hookrun.integrations.harness import install_bundle

_padded_together = huggingface.pad_and_concat


class HookedLM(huggingface.HFLM):  # type: ignore[misc]
    """The harness's model `hf`, with all of its arguments, under the hooks of a bundle.

    pretrained: as for `hf`
    bundle:     the folder that `python -m hookrun.bundle` wrote; None: no hooks. With `peft` names are those of the
                model without the adapter

    hooks: the installation; None without a bundle
    """

    hooks: Installation | None = None
    _tries_sizes = False

    def __init__(self, pretrained: Any, bundle: str | Path | None = None, **options: Any) -> None:
        super().__init__(pretrained, **options)
        self._masks = list[tuple[Tensor, Tensor]]()
        if bundle is not None:
            model = self.model.get_base_model() if self.peft else self.model
            self.hooks, _ = install_bundle(bundle, model, self)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results; with the hash of the hooks' plan."""
        plan = {} if self.hooks is None else {"hookrun_plan": self.hooks.plan.hash}
        return {**super().get_model_info(), **plan}

    # ---- which tokens are padding: the harness tells the model in a generation only ----------------------------------

    def _loglikelihood_tokens(self, *args: Any, **options: Any) -> Any:
        with patch.object(huggingface, "pad_and_concat", self._padded):
            return super()._loglikelihood_tokens(*args, **options)

    def _padded(self, length: int, rows: list[Tensor], padding_side: Any = "right") -> Tensor:
        """The harness's `pad_and_concat`: rows of any lengths as one batch, whose mask is kept until it is used."""
        mask = _padded_together(length, [ones_like(row) for row in rows], padding_side)
        batch: Tensor = _padded_together(length, rows, padding_side)
        self._masks.append((batch, mask))
        return batch

    def _detect_batch_size(self, *args: Any, **options: Any) -> Any:
        with patch.object(self, "_tries_sizes", True):
            return super()._detect_batch_size(*args, **options)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        if self.hooks is not None:
            self._tell_tokens(self.hooks, inps, labels)
        return super()._model_call(inps, attn_mask, labels)

    def _model_generate(self, context: Tensor, *args: Any, **options: Any) -> Any:
        if self.hooks is not None and self.backend == "causal":
            self.hooks.tokens(context, options["attention_mask"])
        return super()._model_generate(context, *args, **options)

    def _tell_tokens(self, hooks: Installation, inputs: Tensor, labels: Tensor | None) -> None:
        """Say which tokens of the next call are padding. An encoder's mask reaches the model, a decoder's does not."""
        batch = inputs if labels is None else labels
        masks = [mask for padded, mask in self._masks if padded is batch]
        self._masks.clear()
        if self._tries_sizes:  # with rows without padding
            masks = [ones_like(batch)]
        if hooks.clock.passes is None:
            return
        if not masks:
            raise HookrunError(
                "this version of lm_eval does not say which tokens are padding: leave out `tokens`"
            )
        if labels is None:
            hooks.tokens(inputs, masks[0])
        elif not masks[0].all():
            raise HookrunError(
                "lm_eval does not say which tokens of the decoder are padding: give batch_size=1, or leave out `tokens`"
            )


register_model("hookrun")(HookedLM)


def main() -> None:
    """The harness's own command."""
    try:
        cli_evaluate()
    except HookrunError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
