"""Continues prompts under the hooks, for a comparison also without: a record of each sample, and a short table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from hookrun.engine.plan.texts import Tokenizer, decoder_of, tokenizer_of
from hookrun.engine.runtime.rng import derived_seed
from hookrun.studies.generate.continuing import (
    Continuation,
    NextTokens,
    continue_prompts,
    divergence,
    most_probable,
    prompts_of,
    runs_together,
)
from hookrun.studies.kit.passes import (
    Batch,
    DataInfo,
    FromFolder,
    RunContext,
    generator_states,
    set_generators,
)

NEXT = 10
"""How many of the most probable first new tokens are recorded."""

SHOWN = 8
"""The number of samples in the terminal's table."""

_MOST_TOKEN = 20
"""How many characters of a token are shown there."""

_MOST_SHOWN = 160
"""How many of a text."""


class Generation:
    """Continues the prompts of a run, one batch at a time, as its `GenerateTask` says."""

    def __init__(self, context: RunContext) -> None:
        model = context.model
        info = context.prepared.data
        task: Any = context.prepared.task
        self._task = task
        self._context = context
        self._texts = Texts(tokenizer_of(model, info.tokenizer).tokenizer)
        self._stop = stop_tokens(task.stop, model, info)
        self._begins = _config_value(model, "forced_bos_token_id")
        self._pad = 0 if info.tokenizer is None else info.tokenizer.pad_id

    def records(self, batch: Batch) -> list[dict[str, Any]]:
        """The lines of generations.jsonl for the samples of the batch, in their order."""
        context = self._context
        texts = self._texts
        prompts = prompts_of(batch, self._task.prompt_tokens)
        without: list[Continuation | None] = [None] * len(prompts)
        if self._task.without_hooks:
            states = generator_states()
            with context.silently(edit=False):
                without[:] = self._continued(batch, prompts)
            set_generators(states)  # so that random numbers that the model itself draws are the same
        now = self._continued(batch, prompts)
        tokens = set[int]()
        for continuation in (*now, *without):
            if continuation is not None:
                tokens.update(continuation.ids)
        context.sink.log_texts(texts.one, tokens)
        records: list[dict[str, Any]] = []
        for row, sample in enumerate(batch.ids.tolist()):
            record = record_of(prompts[row], now[row], texts, without[row])
            records.append({"sample": sample, "split": batch.split, **record})
        return records

    def _continued(self, batch: Batch, prompts: Sequence[list[int]]) -> list[Continuation]:
        """The continuation of each prompt; prompts run together, or those of each length by themselves."""
        context = self._context
        task = self._task
        samples = batch.ids.tolist()
        lengths = [0 if runs_together(context.model) else len(ids) for ids in prompts]
        continued: dict[int, Continuation] = {}
        for length in dict.fromkeys(lengths):
            rows = [row for row, of_row in enumerate(lengths) if of_row == length]
            context.set_batch(replace(batch, ids=batch.ids[rows], labels=batch.labels[rows]))
            numbers = [samples[row] for row in rows]
            seeds = [derived_seed(context.settings.seed, "generation", batch.split, each) for each in numbers]
            choosing = NextTokens(
                task.sampling,
                seeds,
                stop=self._stop,
                most=task.max_new_tokens,
                begins=self._begins,
                pad=self._pad,
            )
            group = [prompts[row] for row in rows]
            device = context.prepared.device
            with context.autocast():
                continue_prompts(context.model, group, choosing, device, cache=task.cache)
            for place, row in enumerate(rows):
                continued[row] = choosing.continuation(place)
        return [continued[row] for row in range(len(prompts))]


def stop_tokens(given: Sequence[int] | None, model: nn.Module, info: DataInfo) -> tuple[int, ...]:
    """The tokens that end a sequence: `given`, or those of the model's config, or that of the tokenizer."""
    if given is not None:
        return tuple(given)
    vocabulary = vocabulary_of(model, info)
    configured = _config_value(model, "eos_token_id")
    if not isinstance(configured, list | tuple):
        configured = [configured]
    stop: list[int] = []
    for token in configured:
        if isinstance(token, int) and 0 <= token < (vocabulary or token + 1):
            stop.append(token)
    if not stop and isinstance(info.tokenizer, FromFolder) and info.tokenizer.separator is not None:
        stop.append(info.tokenizer.separator)
    return tuple(stop)


def vocabulary_of(model: nn.Module, info: DataInfo) -> int | None:
    """The size of the model's vocabulary; None if neither the model's config nor the data has it."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else info.vocab_size


def _config_value(model: nn.Module, name: str) -> Any:
    """The value of an option in the model's generation_config, or in its config; None if neither has it."""
    for config in ("generation_config", "config"):
        value = getattr(getattr(model, config, None), name, None)
        if value is not None:
            return value
    return None


# ---- records ---------------------------------------------------------------------------------------------------


class Texts:
    """Converts tokens to text; the text is None if there is no tokenizer.

    one: a token -> its text; "" if the tokenizer does not know it
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer: Any = tokenizer
        self.one: Callable[[int], str | None] = decoder_of(tokenizer) or (lambda token: None)

    def of(self, tokens: Sequence[int]) -> str | None:
        """The text of consecutive tokens."""
        if self._tokenizer is None:
            return None
        try:
            return str(self._tokenizer.decode(list(tokens))) if tokens else ""
        except Exception:  # any tokenizer's error, as for tokens that only the model has
            return "".join(self.one(token) or "" for token in tokens)


def record_of(
    prompt: list[int], now: Continuation, texts: Texts, without: Continuation | None = None
) -> dict[str, Any]:
    """The entry about one prompt in generations.jsonl.

    now:     its continuation under the hooks
    without: its continuation without the hooks; None: not compared
    """
    record = {"prompt": texts.of(prompt), "prompt_ids": prompt, **_entries(now, texts, "")}
    if without is not None:
        record |= _entries(without, texts, "_without")
        record["kl_first"] = divergence(without.first, now.first)
    return record


def _entries(continuation: Continuation, texts: Texts, suffix: str) -> dict[str, Any]:
    """What a record says of one continuation."""
    most = most_probable(continuation.first, NEXT)
    return {
        f"text{suffix}": texts.of(continuation.ids),
        f"ids{suffix}": continuation.ids,
        f"reason{suffix}": "end" if continuation.is_over else "length",
        f"next{suffix}": [[token, texts.one(token), probability] for token, probability in most],
    }


@dataclass
class Sums:
    """The sums of a pass over samples.

    top: the records of the samples that changed most; without a comparison, of the first samples
    """

    samples: int = 0
    tokens: int = 0
    changed: int = 0
    kl: float = 0.0
    top: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one line of generations.jsonl."""
        self.samples += 1
        self.tokens += len(record["ids"])
        self.changed += _differs(record)
        self.kl += record.get("kl_first", 0.0)
        self.top.append(record)
        # The sort is stable: equal samples stay in the order of the data.
        self.top.sort(key=lambda each: (-each.get("kl_first", 0.0), not _differs(each)))
        del self.top[SHOWN:]

    def read(self, *, compared: bool) -> dict[str, float]:
        """The metrics: counts, and if compared, the fraction of samples that changed and the mean KL in nats."""
        found: dict[str, float] = {"samples": self.samples, "new_tokens": self.tokens}
        if compared and self.samples:
            found |= {"changed": self.changed / self.samples, "kl_first": self.kl / self.samples}
        return found

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, as plain values."""
        return {**vars(self), "top": [dict(record) for record in self.top]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by saved ones."""
        vars(self).update(state, top=list(state["top"]))


def _differs(record: Mapping[str, Any]) -> bool:
    """Whether the continuation is not that without the hooks."""
    return bool(record["ids"] != record.get("ids_without", record["ids"]))


# ---- in the terminal -------------------------------------------------------------------------------------------


def show(sums: Sums, console: Console, *, compared: bool) -> None:
    """Print the samples that changed most, or without a comparison the first ones."""
    if not compared:
        _show_continuations(sums.top, console, compared=False)
        return
    first = [record for record in sums.top if record["kl_first"] > 0]
    later = [record for record in sums.top if _differs(record)]
    if first:
        console.print(
            "first new token: the samples that changed most (KL in nats, top token without hooks → with)"
        )
        table = Table.grid(padding=(0, 2))
        for record in first:
            change = f"{_next(record, '_without')} → {_next(record, '')}"
            table.add_row(_name(record), f"{record['kl_first']:.3g}", change, _prompt(record))
        console.print(table, soft_wrap=False)
        return
    if later:
        console.print("the first new token is the same as without hooks; later tokens changed:")
    else:
        console.print("the hooks changed neither the first new token's probabilities nor a continuation")
    _show_continuations(later, console, compared=True)


def _show_continuations(records: Sequence[Mapping[str, Any]], console: Console, *, compared: bool) -> None:
    table = Table.grid(padding=(0, 1))
    for record in records:
        table.add_row(f"{_name(record)}:", _prompt(record))
        if compared:
            table.add_row("      without:", _beginning(record, "_without"))
        table.add_row("      with:" if compared else "      →", _beginning(record, ""))
    console.print(table, soft_wrap=False)


def _name(record: Mapping[str, Any]) -> str:
    return f"  {record['split']} {record['sample']}"


def _prompt(record: Mapping[str, Any]) -> str:
    """The end of the prompt, from a word on."""
    prompt = repr(record["prompt"] or "")
    if len(prompt) > _MOST_SHOWN:
        prompt = f"… {prompt[-_MOST_SHOWN:].partition(' ')[2]}"
    return prompt


def _next(record: Mapping[str, Any], which: str) -> str:
    """The most probable first new token."""
    token, text, probability = record[f"next{which}"][0]
    return f"{_token(token, text)} {probability:.1%}"


def _token(token: int, text: str | None) -> str:
    if not text:
        return f"#{token}"
    return repr(text if len(text) <= _MOST_TOKEN else f"{text[:_MOST_TOKEN]}…")


def _beginning(record: Mapping[str, Any], which: str) -> str:
    """The beginning of a continuation; its token ids if it has no text."""
    text = record[f"text{which}"]
    ids = " ".join(map(str, record[f"ids{which}"][:_MOST_SHOWN]))
    return repr((ids if text is None else text)[:_MOST_SHOWN])
