"""Continues the prompts of a batch, with transformers' `generate`, or for other models with a loop of hookrun.

Prompts are padded again, on the side that lets each prompt continue as it would alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hookrun.engine.runtime.rng import derived_seed
from hookrun.engine.runtime.tokens.calls import IDS, MASK, POSITIONS, parameters_of
from hookrun.engine.values.tensors import computable, on_device, read_together
from hookrun.errors import HookrunError
from hookrun.studies.kit.passes import Batch, RowPart, kl, own_token_scores
from hookrun.studies.kit.tasks import Sampling


def prompts_of(batch: Batch, most: int | None) -> list[list[int]]:
    """The tokens of each sample without padding, at most the first `most`. HookrunError if a sample has no tokens."""
    inputs: Any = batch.inputs
    tokens, mask = read_together([inputs[IDS], inputs.get(MASK, torch.ones_like(inputs[IDS]))])
    prompts: list[list[int]] = []
    for sample, row, is_real in zip(batch.ids.tolist(), tokens, mask != 0, strict=True):
        prompts.append(row[is_real].tolist()[:most])
        if not prompts[-1]:
            name = f"sample {sample} of the {batch.split} split"
            if file := batch.data.file(sample):
                name += f" ({file})"
            raise HookrunError(f"{name} has no tokens to continue: leave it out of the data")
    return prompts


def padded(prompts: Sequence[list[int]], pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask, both [n, length of the longest prompt] int64, padded on the left or on the right."""
    rows = [torch.tensor(ids) for ids in prompts]
    side = "left" if left else "right"
    tokens = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side=side)
    masks = [torch.ones_like(row) for row in rows]
    return tokens, pad_sequence(masks, batch_first=True, padding_side=side)


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
    device: torch.device,
    *,
    cache: bool = True,
) -> None:
    """Compute the scores of each next token with the model and choose it with `choosing`, until all prompts end.

    cache: keep keys and values from token to token, if the model can
    """
    tokens = padded(prompts, choosing.pad, left=not (generates(model) and has_encoder(model)))
    input_ids = on_device(tokens[0], device)
    mask = on_device(tokens[1], device)
    if generates(model):
        _generate(model, input_ids, mask, choosing, cache=cache)
    else:
        LoopContinuer(model).generate(input_ids, mask, choosing)


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


def _generate(model: Any, input_ids: Tensor, mask: Tensor, choosing: NextTokens, *, cache: bool) -> None:
    """Continue prompts with transformers' `generate`, which handles each architecture's cache and positions.

    hookrun chooses the tokens: a logits processor sets the scores of all other tokens to -inf, so that greedy search
    takes the chosen one. From the model's own `generation_config` only the tokens that begin a sequence are used; it
    is replaced meanwhile, since `generate` takes unset options from it.
    """
    import transformers

    def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = on_device(choosing.choose(scores), scores.device)
        return scores.fill_(-torch.inf).scatter_(1, chosen[:, None], 0.0)

    config_class: Any = transformers.GenerationConfig  # Any: the class is not typed
    own = model.generation_config
    model.generation_config = config_class(
        max_new_tokens=choosing.most,
        do_sample=False,
        num_beams=1,
        use_cache=cache,
        eos_token_id=sorted(choosing.stop) or None,
        pad_token_id=choosing.pad,
        bos_token_id=own.bos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    inputs = {IDS: input_ids}
    if MASK in parameters_of(model):
        inputs[MASK] = mask
    try:
        model.generate(**inputs, generation_config=model.generation_config, logits_processor=[choose])
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

    def generate(self, input_ids: Tensor, mask: Tensor, choosing: NextTokens) -> None:
        """Append tokens until all sequences end; input_ids and mask: [B, T], padded on the left."""
        # hooks with `tokens` read this variable
        generation_config = SimpleNamespace(eos_token_id=sorted(choosing.stop))  # noqa: F841
        batch_size = len(input_ids)
        names = parameters_of(self.model)
        while not choosing.is_over:
            named: dict[str, Tensor] = {}
            if MASK in names:
                named[MASK] = mask
            if POSITIONS in names:
                named[POSITIONS] = (mask.cumsum(-1) - 1).clamp(min=0)
            inputs = [input_ids]
            if IDS in names:
                named[IDS] = inputs.pop()
            output = self.model(*inputs, **named)
            chosen = on_device(choosing.choose(next_scores(output, input_ids)), input_ids.device)
            input_ids = torch.cat([input_ids, chosen[:, None]], dim=1)
            mask = torch.cat([mask, mask.new_ones(batch_size, 1)], dim=1)


def next_scores(output: Any, input_ids: Tensor) -> Tensor:
    """[B, V]: the scores of the next token, in float32 or float64. HookrunError if the output has no such scores."""
    scores = own_token_scores(output)
    if scores is None or scores.dim() != 3 or scores.shape[:2] != input_ids.shape:
        what = f"a {type(output).__name__}" if scores is None else f"shape {list(scores.shape)}"
        raise HookrunError(
            f"task=generate needs scores [batch, length, vocabulary] for tokens {list(input_ids.shape)}, and the model "
            f"returned {what}: use a language model, whose output or its `logits` are the scores of the next tokens"
        )
    return computable(scores.detach()[:, -1])


class Continuation(NamedTuple):
    """The continuation of one prompt.

    ids:     the chosen tokens, including the end token
    is_over: it has its end token
    first:   [V], the model's scores for the first token
    """

    ids: list[int]
    is_over: bool
    first: Tensor


class NextTokens:
    """Chooses the next token of each sequence of a batch, and records the chosen tokens.

    sampling: how to draw; None: choose the most probable token
    seeds:    the seed of each sequence's draws
    stop:     tokens that end a sequence
    most:     the largest number of new tokens of a sequence
    begins:   the first token of every answer, which some models prescribe; None: it is chosen too
    pad:      the token after the end of a sequence
    tokens:   the chosen tokens of each sequence, including its end token
    first:    [B, V] on the CPU, the model's scores for the first new token; None before the first choice
    """

    def __init__(
        self,
        sampling: Sampling | None,
        seeds: Sequence[int],
        *,
        stop: Collection[int],
        most: int,
        begins: int | None = None,
        pad: int = 0,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in seeds]
        self.first: Tensor | None = None
        self._sampling = sampling
        self._seeds = seeds
        self.stop = frozenset(stop)
        self.most = most
        self.pad = pad
        self._begins = begins
        self._open = [True] * len(seeds)
        self._step = 0

    @property
    def is_over(self) -> bool:
        """Whether every sequence has its end token or its largest number of tokens."""
        return self._step >= self.most or not any(self._open)

    def continuation(self, row: int) -> Continuation:
        """What was chosen for a sequence. It has at least one token."""
        assert self.first is not None
        return Continuation(self.tokens[row], not self._open[row], self.first[row])

    def choose(self, logits: Tensor) -> Tensor:
        """[B] int64 on the CPU: the next token of each sequence, from the model's scores [B, V].

        Raises HookrunError if a sequence has no finite score.
        """
        if self.is_over:  # a loop on an accelerator may call once more before it stops
            return torch.full((len(self.tokens),), self.pad)
        best = logits.max(-1)
        wanted = [best.values.isfinite(), self._chosen(logits, best.indices)]
        if self._step == 0:
            wanted.append(logits.clone())
        finite, tokens, *scores = read_together(wanted)
        if scores:
            self.first = scores[0]
        for row, is_finite in enumerate(finite.tolist()):
            if self._open[row] and not is_finite:
                raise HookrunError(
                    f"sequence {row} of the batch has no finite score for its new token {self._step}: "
                    "the model or its hooks returned NaN or infinity; a `check` hook on its layers finds where"
                )
        chosen = tokens.tolist()
        for row, token in enumerate(chosen):
            if not self._open[row]:
                chosen[row] = self.pad
                continue
            self.tokens[row].append(token)
            self._open[row] = token not in self.stop
        self._step += 1
        return torch.tensor(chosen)

    def _chosen(self, logits: Tensor, best: Tensor) -> Tensor:
        """best: [B] int64, the most probable tokens."""
        if self._begins is not None and self._step == 0:
            return torch.full_like(best, self._begins)
        if self._sampling is None:
            return best
        scores = restricted(logits, self._sampling)
        return (scores + self._noise(scores)).argmax(-1)

    def _noise(self, scores: Tensor) -> Tensor:
        """Gumbel noise [B, V]: the argmax of scores + noise is a draw from the softmax of the scores.

        The noise of a token does not depend on the scores, so small changes by hooks change few draws.
        """
        noise = torch.ones(scores.shape)
        generator = torch.Generator()
        for row, seed in enumerate(self._seeds):
            if self._open[row]:
                noise[row].exponential_(generator=generator.manual_seed(derived_seed(seed, self._step)))
        return on_device(noise.log_().neg_(), scores.device).to(scores.dtype)


def restricted(logits: Tensor, sampling: Sampling) -> Tensor:
    """The scores [B, V] after temperature, top_k and top_p; -infinity for tokens that cannot be drawn."""
    scores = (logits - logits.max(-1, keepdim=True).values) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, places = scores.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        beyond = (before >= sampling.top_p).index_fill(-1, torch.tensor([0], device=scores.device), False)
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, places, beyond), -torch.inf)
    return scores


def most_probable(scores: Tensor, count: int) -> list[tuple[int, float]]:
    """The most probable tokens as (token, probability), from scores [V]."""
    top = _precise(scores).softmax(-1).topk(min(count, len(scores)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def divergence(of: Tensor, other: Tensor) -> float:
    """KL(P || Q) in nats: P the softmax of the scores `of` [V], Q that of `other`."""
    p = _precise(of)[None]
    q = _precise(other)[None]
    values = kl(RowPart(q, p.new_zeros(1, dtype=torch.int64), others=p))
    assert values is not None
    return float(values)


def _precise(scores: Tensor) -> Tensor:
    """In float64 on the CPU: sums over a vocabulary are long, and some accelerators have no float64."""
    return scores.detach().to("cpu").double()
