"""Continues the prompts of a batch, with transformers' `generate`, or for other models with a loop of hookrun.

Prompts are padded again, on the side that lets each prompt continue as it would alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.run_values import computable
from hookrun.runtime.tokens.calls import IDS, MASK, POSITIONS, parameters_of
from hookrun.spec.task import Sampling
from hookrun.tasks.generation.next_token import NextTokens
from hookrun.tasks.metrics.rows import token_scores
from hookrun.tasks.run.batches import Batch


@dataclass(frozen=True)
class GenerationKeys:
    """The keys of task=generate; see `GenerateTask`."""

    max_new_tokens: int = 32
    sampling: Sampling | None = None
    compare: bool = False
    stop: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    cache: bool = True


def prompts_of(batch: Batch, most: int | None) -> list[list[int]]:
    """The tokens of each sample without padding, at most the first `most`. HookrunError if a sample has no tokens."""
    inputs = batch.inputs
    assert isinstance(inputs, Mapping)
    tokens = inputs[IDS].cpu()
    mask = inputs[MASK].cpu() != 0 if MASK in inputs else torch.ones_like(tokens, dtype=torch.bool)
    prompts: list[list[int]] = [row[real].tolist()[:most] for row, real in zip(tokens, mask, strict=True)]
    for sample, ids in zip(batch.ids.tolist(), prompts, strict=True):
        if not ids:
            at = batch.data.file(sample)
            name = f"sample {sample} of the {batch.split} split" + (f" ({at})" if at else "")
            raise HookrunError(f"{name} has no tokens to continue: leave it out of the data")
    return prompts


def padded(prompts: Sequence[list[int]], pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask, both [n, length of the longest prompt] int64, padded on the left or on the right."""
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(prompts):
        part = slice(width - len(ids), width) if left else slice(0, len(ids))
        tokens[row, part], mask[row, part] = torch.tensor(ids), 1
    return tokens, mask


def runs_together(model: nn.Module) -> bool:
    """Whether prompts of different lengths can run together; otherwise each length runs by itself.

    A model that does not take position ids counts padding as positions, and may accept a mask but ignore it.
    """
    names = parameters_of(model)
    return MASK in names and (POSITIONS in names or (generates(model) and has_encoder(model)))


def continue_prompts(
    model: nn.Module,
    prompts: Sequence[list[int]],
    choosing: NextTokens,
    keys: GenerationKeys,
    device: torch.device,
    *,
    stop: tuple[int, ...],
    pad: int,
) -> None:
    """Compute the scores of each next token with the model and choose it with `choosing`, until all prompts end.

    stop: tokens that end a sequence
    pad:  the padding token
    """
    tokens = padded(prompts, pad, left=not (generates(model) and has_encoder(model)))
    input_ids, mask = (each.to(device) for each in tokens)
    if generates(model):
        _generate(model, input_ids, mask, choosing, keys, stop=stop, pad=pad)
    else:
        LoopContinuer(model).generate(input_ids, mask, choosing, stop)


def generates(model: nn.Module) -> bool:
    """Whether it is a transformers model with a method `generate`."""
    able = getattr(model, "can_generate", None)
    return callable(able) and bool(able()) and callable(getattr(model, "generate", None))


def cannot_generate(model: nn.Module) -> bool:
    """Whether it is a transformers model that cannot generate, such as one for masked tokens."""
    return callable(getattr(model, "can_generate", None)) and not generates(model)


def has_encoder(model: nn.Module) -> bool:
    """Whether the model is an encoder-decoder: the encoder reads the prompt, and the decoder starts empty."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _generate(
    model: Any,
    input_ids: Tensor,
    mask: Tensor,
    choosing: NextTokens,
    keys: GenerationKeys,
    *,
    stop: tuple[int, ...],
    pad: int,
) -> None:
    """Continue prompts with transformers' `generate`, which handles each architecture's cache and positions.

    hookrun chooses the tokens: a logits processor sets the scores of all other tokens to -inf, so that greedy search
    takes the chosen one. From the model's own `generation_config` only the tokens that begin a sequence are used; it
    is replaced meanwhile, since `generate` takes unset options from it.
    """
    import transformers

    def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = choosing.choose(scores).to(scores.device)
        return scores.fill_(-torch.inf).scatter_(1, chosen[:, None], 0.0)

    config_class: Any = transformers.GenerationConfig  # Any: the class is not typed
    own = model.generation_config
    model.generation_config = config_class(
        max_new_tokens=keys.max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=keys.cache,
        eos_token_id=list(stop) or None,
        pad_token_id=pad,
        bos_token_id=own.bos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    given = {IDS: input_ids, MASK: mask} if MASK in parameters_of(model) else {IDS: input_ids}
    try:
        model.generate(**given, generation_config=model.generation_config, logits_processor=[choose])
    finally:
        model.generation_config = own


class LoopContinuer(nn.Module):
    """Continues prompts with a model that maps tokens [B, T] to scores [B, T, V]; each pass computes all tokens so far.

    Hooks with `tokens` recognize a generation by a method named `generate` of a module that contains the model, with
    the local variables `input_ids`, `generation_config` (as in transformers) and `batch_size`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def generate(self, input_ids: Tensor, mask: Tensor, choosing: NextTokens, stop: tuple[int, ...]) -> None:
        """Append tokens until all sequences end; input_ids and mask: [B, T], padded on the left."""
        generation_config = SimpleNamespace(eos_token_id=list(stop))  # noqa: F841 - read by hooks with `tokens`
        batch_size, names = len(input_ids), parameters_of(self.model)
        while not choosing.is_over:
            named = {MASK: mask} if MASK in names else {}
            if POSITIONS in names:
                named[POSITIONS] = (mask.cumsum(-1) - 1).clamp(min=0)
            output = (
                self.model(input_ids=input_ids, **named) if IDS in names else self.model(input_ids, **named)
            )
            chosen = choosing.choose(next_scores(output, input_ids)).to(input_ids.device)
            input_ids = torch.cat([input_ids, chosen[:, None]], dim=1)
            mask = torch.cat([mask, mask.new_ones(batch_size, 1)], dim=1)


def next_scores(output: Any, input_ids: Tensor) -> Tensor:
    """[B, V]: the scores of the next token, in float32 or float64. HookrunError if the output has no such scores."""
    scores = token_scores(output)
    if scores is None or scores.dim() != 3 or scores.shape[:2] != input_ids.shape:
        what = f"a {type(output).__name__}" if scores is None else f"shape {list(scores.shape)}"
        raise HookrunError(
            f"task=generate needs scores [batch, length, vocabulary] for tokens {list(input_ids.shape)}, and the model "
            f"returned {what}: use a language model, whose output or its `logits` are the scores of the next tokens"
        )
    return computable(scores[:, -1])
