"""Continues the prompts of a batch, with transformers' `generate`, or for other models with a loop of hookrun.

Prompts are padded again, on the side that lets each prompt continue as it would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.runtime.tokens.calls import IDS, MASK, POSITIONS, parameters_of
from hookrun.tasks.generation.next_token import NextTokens
from hookrun.tasks.run.batches import Batch
from hookrun.values.containers import children

if TYPE_CHECKING:
    from transformers import GenerationConfig

LEFT, RIGHT = "left", "right"


@dataclass(frozen=True)
class PromptGroup:
    """Prompts of a batch that run through the model together.

    places: their rows in the batch
    ids:    the tokens of each, without padding
    """

    places: tuple[int, ...]
    ids: tuple[list[int], ...]

    def padded(self, side: str, pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and attention mask, both [n, length of the longest] int64."""
        width = max(map(len, self.ids))
        tokens = torch.full((len(self.ids), width), pad)
        mask = torch.zeros_like(tokens)
        for row, ids in enumerate(self.ids):
            part = slice(width - len(ids), width) if side == LEFT else slice(0, len(ids))
            tokens[row, part], mask[row, part] = torch.tensor(ids), 1
        return tokens.to(device), mask.to(device)


def prompts_of(batch: Batch, most: int | None) -> list[list[int]]:
    """The tokens of each sample without padding, at most the first `most`. HookrunError if a sample has no tokens."""
    inputs = batch.inputs
    assert isinstance(inputs, Mapping)
    tokens = inputs[IDS].cpu()
    mask = inputs[MASK].cpu() != 0 if MASK in inputs else torch.ones_like(tokens, dtype=torch.bool)
    found: list[list[int]] = [row[real].tolist()[:most] for row, real in zip(tokens, mask, strict=True)]
    for sample, ids in zip(batch.ids.tolist(), found, strict=True):
        if not ids:
            at = batch.data.file(sample)
            name = f"sample {sample} of the {batch.split} split" + (f" ({at})" if at else "")
            raise HookrunError(f"{name} has no tokens to continue: leave it out of the data")
    return found


class Continuer(Protocol):
    """Continues a group of prompts with a model."""

    @property
    def together(self) -> bool:
        """Whether prompts of different lengths can run together; otherwise each length runs by itself."""

    def run(self, prompts: PromptGroup, choosing: NextTokens, device: torch.device) -> None:
        """Compute the scores of each next token with the model and choose it with `choosing`, until all prompts end."""


@dataclass(frozen=True)
class ContinuationOptions:
    """How prompts are continued.

    most:  the largest number of new tokens of each prompt
    stop:  tokens that end a sequence
    pad:   the padding token
    cache: keep keys and values from one token to the next, if the model can
    """

    most: int
    stop: tuple[int, ...]
    pad: int
    cache: bool


def groups(ids: Sequence[list[int]], *, together: bool) -> Iterator[PromptGroup]:
    """One group with all prompts of a batch, or a group for each length of prompt."""
    if together:
        yield PromptGroup(tuple(range(len(ids))), tuple(ids))
        return
    for length in dict.fromkeys(map(len, ids)):
        places = tuple(place for place, each in enumerate(ids) if len(each) == length)
        yield PromptGroup(places, tuple(ids[place] for place in places))


def continuer_of(model: nn.Module, options: ContinuationOptions) -> Continuer:
    """The object that continues prompts with this model."""
    return TransformersContinuer(model, options) if generates(model) else LoopContinuer(model, options)


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


class TransformersContinuer:
    """Continues prompts with transformers' `generate`, which handles each architecture's cache and positions.

    hookrun chooses the tokens: a logits processor sets the scores of all other tokens to -inf, so that greedy search
    takes the chosen one. From the model's own `generation_config` only the tokens that begin a sequence are used.
    """

    def __init__(self, model: nn.Module, options: ContinuationOptions) -> None:
        self._model: Any = model
        self._options = options
        names = parameters_of(model)
        # Some models that do not take position ids accept a mask but ignore it.
        self.together = MASK in names and (POSITIONS in names or has_encoder(model))
        self._masked = MASK in names

    def run(self, prompts: PromptGroup, choosing: NextTokens, device: torch.device) -> None:
        """See `Continuer`."""
        side = RIGHT if has_encoder(self._model) else LEFT
        input_ids, mask = prompts.padded(side, self._options.pad, device)

        def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
            chosen = choosing.choose(scores).to(scores.device)
            return scores.fill_(-torch.inf).scatter_(1, chosen[:, None], 0.0)

        with self._configured() as config:
            given = {IDS: input_ids, MASK: mask} if self._masked else {IDS: input_ids}
            self._model.generate(**given, generation_config=config, logits_processor=[choose])

    @contextmanager
    def _configured(self) -> Iterator[GenerationConfig]:
        """Replace the model's `generation_config` in the block, since `generate` takes unset options from it."""
        import transformers

        made: Any = transformers.GenerationConfig  # Any: the class is not typed
        model, options = self._model, self._options
        own = model.generation_config
        config = made(
            max_new_tokens=options.most,
            do_sample=False,
            num_beams=1,
            use_cache=options.cache,
            eos_token_id=list(options.stop) or None,
            pad_token_id=options.pad,
            bos_token_id=own.bos_token_id,
            decoder_start_token_id=own.decoder_start_token_id,
        )
        model.generation_config = config
        try:
            yield config
        finally:
            model.generation_config = own


@dataclass(frozen=True)
class LoopConfig:
    """The generation config that hooks with `tokens` read during a generation, as in transformers."""

    eos_token_id: list[int]


class LoopContinuer(nn.Module):
    """Continues prompts with a model that maps tokens [B, T] to scores [B, T, V]; each pass computes all tokens so far.

    Hooks with `tokens` recognize a generation by a method named `generate` of a module that contains the model, with
    the local variables `input_ids`, `generation_config` and `batch_size`.
    """

    def __init__(self, model: nn.Module, options: ContinuationOptions) -> None:
        super().__init__()
        self.model = model
        self._options = options
        names = parameters_of(model)
        self._named = IDS in names
        self._takes_positions = POSITIONS in names
        # A model that does not take position ids counts padding as positions.
        self.together = MASK in names and self._takes_positions
        self._masked = MASK in names

    def run(self, prompts: PromptGroup, choosing: NextTokens, device: torch.device) -> None:
        """See `Continuer`."""
        self.generate(
            *prompts.padded(LEFT, self._options.pad, device), choosing.choose, lambda: choosing.is_over
        )

    def generate(
        self,
        input_ids: Tensor,
        mask: Tensor,
        choose: Callable[[Tensor], Tensor],
        is_over: Callable[[], bool],
    ) -> None:
        """Append tokens until `is_over` returns True; input_ids and mask: [B, T], padded on the left."""
        generation_config = LoopConfig(list(self._options.stop))  # noqa: F841 - read by hooks with `tokens`
        batch_size = len(input_ids)
        while not is_over():
            scores = next_scores(self._call(input_ids, mask), input_ids)
            chosen = choose(scores).to(input_ids.device)
            input_ids = torch.cat([input_ids, chosen[:, None]], dim=1)
            mask = torch.cat([mask, mask.new_ones(batch_size, 1)], dim=1)

    def _call(self, input_ids: Tensor, mask: Tensor) -> Any:
        named = {MASK: mask} if self._masked else {}
        if self._takes_positions:
            named[POSITIONS] = (mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(input_ids=input_ids, **named) if self._named else self.model(input_ids, **named)


def next_scores(output: Any, input_ids: Tensor) -> Tensor:
    """[B, V]: the scores of the next token, in float32 or float64. HookrunError if the output has no such scores."""
    members = dict(children(output))
    found = output if isinstance(output, Tensor) else members.get("logits", members.get(0))
    if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[:2] != input_ids.shape:
        what = f"shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(output).__name__}"
        raise HookrunError(
            f"task=generate needs scores [batch, length, vocabulary] for tokens {list(input_ids.shape)}, and the model "
            f"returned {what}: use a language model, whose output or its `logits` are the scores of the next tokens"
        )
    last = found[:, -1]
    return last.float() if last.dtype in (torch.bfloat16, torch.float16) else last
