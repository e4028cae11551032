"""Continues the prompts of each batch under the hooks, and for a comparison also without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hookrun.data import DataInfo
from hookrun.data.tokenizer import FromFolder, Tokenizer
from hookrun.plan.texts import tokenizer_of
from hookrun.runtime.rng import derived_seed
from hookrun.spec.sampling import Sampling
from hookrun.tasks.loop.batches import Batch
from hookrun.tasks.loop.context import RunContext
from hookrun.tasks.loop.continuing import ContinuationOptions, continuer_of, groups, prompts_of
from hookrun.tasks.loop.generated import Texts, records_of
from hookrun.tasks.loop.generators import generator_states, set_generators
from hookrun.tasks.loop.next_token import NextTokens


@dataclass(frozen=True)
class GenerationSettings:
    """The keys of task=generate; see `GenerateTask`."""

    max_new_tokens: int
    sampling: Sampling | None
    compare: bool
    stop: tuple[int, ...] | None
    prompt_tokens: int | None
    cache: bool


class Generation:
    """Continues the prompts of a run, one batch at a time."""

    def __init__(self, settings: GenerationSettings, running: RunContext) -> None:
        model, info = running.model, running.prepared.data
        self._settings, self._running = settings, running
        self._texts = Texts(tokenizer_of(model, info.tokenizer).tokenizer)
        self._stop = stop_tokens(settings.stop, model, info)
        self._begins = _config_value(model, "forced_bos_token_id")
        self._pad = 0 if info.tokenizer is None else info.tokenizer.pad_id
        self._continuer = continuer_of(
            model, ContinuationOptions(settings.max_new_tokens, self._stop, self._pad, settings.cache)
        )

    def records(self, batch: Batch) -> list[dict[str, Any]]:
        """The lines of generations.jsonl for the samples of the batch, in their order."""
        prompts = prompts_of(batch, self._settings.prompt_tokens)
        before = generator_states() if self._settings.compare else {}
        now = self._continued(batch, prompts)
        without = None
        if self._settings.compare:
            after = generator_states()
            set_generators(before)  # so that random numbers that the model itself draws are the same
            with self._running.hooks.paused():
                without = self._continued(batch, prompts)
            set_generators(after)
        records = records_of(prompts, now, self._texts, without)
        self._log_texts(now, without)
        about = [{"sample": sample, "split": batch.split} for sample in batch.ids.tolist()]
        return [{**sample, **record} for sample, record in zip(about, records, strict=True)]

    def _continued(self, batch: Batch, prompts: Sequence[list[int]]) -> NextTokens:
        running, samples = self._running, batch.ids.tolist()
        parts = list(groups(prompts, together=self._continuer.together))
        found = list[NextTokens]()
        for part in parts:
            places = list(part.places)
            running.set_batch(batch if len(parts) == 1 else replace(batch, ids=batch.ids[places]))
            choosing = self._choosing(batch, [samples[place] for place in places])
            with running.autocast():
                self._continuer.run(part, choosing, running.prepared.device)
            found.append(choosing)
        return found[0] if len(found) == 1 else NextTokens.joined(found, [part.places for part in parts])

    def _choosing(self, batch: Batch, samples: Sequence[int]) -> NextTokens:
        seed = self._running.settings.seed
        return NextTokens(
            self._settings.sampling,
            [derived_seed(seed, "generation", batch.split, sample) for sample in samples],
            stop=self._stop,
            most=self._settings.max_new_tokens,
            begins=self._begins,
            pad=self._pad,
        )

    def _log_texts(self, *found: NextTokens | None) -> None:
        """Record the text of each new token, for the report."""
        tokens = {token for each in found if each is not None for ids in each.tokens for token in ids}
        self._running.sink.log_texts(self._texts.one, tokens)


def stop_tokens(given: Sequence[int] | None, model: nn.Module, info: DataInfo) -> tuple[int, ...]:
    """The tokens that end a sequence: `given`, or those of the model's config, or that of the tokenizer."""
    if given is not None:
        return tuple(given)
    vocabulary = vocabulary_of(model, info)
    named = _config_value(model, "eos_token_id")
    numbers = named if isinstance(named, list | tuple) else [named]
    own = tuple(each for each in numbers if isinstance(each, int) and 0 <= each < (vocabulary or each + 1))
    return own or _end_of(info.tokenizer)


def _end_of(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    end = tokenizer.separator if isinstance(tokenizer, FromFolder) else None
    return () if end is None else (end,)


def vocabulary_of(model: nn.Module, info: DataInfo) -> int | None:
    """The size of the model's vocabulary; None if neither the model's config nor the data has it."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else info.vocab_size


def _config_value(model: nn.Module, name: str) -> Any:
    """The value of an option in the model's generation_config, or in its config; None if neither has it."""
    configs = (getattr(model, each, None) for each in ("generation_config", "config"))
    return next((found for each in configs if (found := getattr(each, name, None)) is not None), None)
