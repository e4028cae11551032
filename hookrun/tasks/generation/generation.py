"""Continues prompts under the hooks, for a comparison also without: a record of each sample, and a short table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.cells import cell_len
from torch import nn

from hookrun.data import DataInfo
from hookrun.data.tokenizer import FromFolder
from hookrun.plan.texts import Tokenizer, decoder_of, tokenizer_of
from hookrun.runtime.rng import derived_seed
from hookrun.spec.task import Sampling
from hookrun.tasks.generation.continuing import ContinuationOptions, continuer_of, groups, prompts_of
from hookrun.tasks.generation.next_token import NextTokens, divergences, most_probable
from hookrun.tasks.run.batches import Batch
from hookrun.tasks.run.context import RunContext
from hookrun.tasks.run.generators import generator_states, set_generators

NEXT = 10
"""How many of the most probable first new tokens are recorded."""

SHOWN = 8
"""The number of samples in the terminal's table."""

_MOST_TOKEN = 20
_MOST_SHOWN = 2_000
"""How many characters of a text are kept for the terminal's table."""


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

    def __init__(self, settings: GenerationSettings, context: RunContext) -> None:
        model, info = context.model, context.prepared.data
        self._settings, self._context = settings, context
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
            with self._context.hooks.paused():
                without = self._continued(batch, prompts)
            set_generators(after)
        records = records_of(prompts, now, self._texts, without)
        self._log_texts(now, without)
        about = [{"sample": sample, "split": batch.split} for sample in batch.ids.tolist()]
        return [{**sample, **record} for sample, record in zip(about, records, strict=True)]

    def _continued(self, batch: Batch, prompts: Sequence[list[int]]) -> NextTokens:
        context, samples = self._context, batch.ids.tolist()
        parts = list(groups(prompts, together=self._continuer.together))
        found = list[NextTokens]()
        for part in parts:
            places = list(part.places)
            context.set_batch(batch if len(parts) == 1 else replace(batch, ids=batch.ids[places]))
            choosing = self._choosing(batch, [samples[place] for place in places])
            with context.autocast():
                self._continuer.run(part, choosing, context.prepared.device)
            found.append(choosing)
        return found[0] if len(found) == 1 else NextTokens.joined(found, [part.places for part in parts])

    def _choosing(self, batch: Batch, samples: Sequence[int]) -> NextTokens:
        seed = self._context.settings.seed
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
        self._context.sink.log_texts(self._texts.one, tokens)


def stop_tokens(given: Sequence[int] | None, model: nn.Module, info: DataInfo) -> tuple[int, ...]:
    """The tokens that end a sequence: `given`, or those of the model's config, or that of the tokenizer."""
    if given is not None:
        return tuple(given)
    vocabulary = vocabulary_of(model, info)
    named = _config_value(model, "eos_token_id")
    numbers = named if isinstance(named, list | tuple) else [named]
    own = tuple(each for each in numbers if isinstance(each, int) and 0 <= each < (vocabulary or each + 1))
    end = info.tokenizer.separator if isinstance(info.tokenizer, FromFolder) else None
    return own or (() if end is None else (end,))


def vocabulary_of(model: nn.Module, info: DataInfo) -> int | None:
    """The size of the model's vocabulary; None if neither the model's config nor the data has it."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else info.vocab_size


def _config_value(model: nn.Module, name: str) -> Any:
    """The value of an option in the model's generation_config, or in its config; None if neither has it."""
    configs = (getattr(model, each, None) for each in ("generation_config", "config"))
    return next((found for each in configs if (found := getattr(each, name, None)) is not None), None)


# ---- records ---------------------------------------------------------------------------------------------------


class Texts:
    """Converts tokens to text; the text is None if there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer: Any = tokenizer
        self._decode = decoder_of(tokenizer)

    def of(self, tokens: Sequence[int]) -> str | None:
        """The text of consecutive tokens."""
        if self._decode is None:
            return None
        try:
            return str(self._tokenizer.decode(list(tokens))) if tokens else ""
        except Exception:  # any tokenizer's error, as for tokens that only the model has
            return "".join(map(self._decode, tokens))

    def one(self, token: int) -> str | None:
        """The text of one token; "" if the tokenizer does not know it."""
        return None if self._decode is None else self._decode(token)


def record_of(
    prompt: list[int], row: int, now: NextTokens, texts: Texts, next_tokens: list[tuple[int, float]]
) -> dict[str, Any]:
    """The entry about one continuation in generations.jsonl.

    row:         the row of the sample in `now`
    next_tokens: the most probable first new tokens
    """
    ids = now.tokens[row]
    return {
        "prompt": texts.of(prompt),
        "prompt_ids": prompt,
        "text": texts.of(ids),
        "ids": ids,
        "reason": "end" if now.ended(row) else "length",
        "next": _next(next_tokens, texts),
    }


def records_of(
    prompts: Sequence[list[int]], now: NextTokens, texts: Texts, without: NextTokens | None = None
) -> list[dict[str, Any]]:
    """The record of each prompt.

    now:     the continuations under the hooks
    without: the continuations of the same prompts without hooks; None: not compared
    """
    assert now.first is not None
    tops = most_probable(now.first, NEXT)
    records = [record_of(ids, row, now, texts, tops[row]) for row, ids in enumerate(prompts)]
    if without is None:
        return records
    assert without.first is not None
    others, changes = most_probable(without.first, NEXT), divergences(without.first, now.first)
    for row, record in enumerate(records):
        other = record_of(prompts[row], row, without, texts, others[row])
        record.update({f"{name}_without": other[name] for name in ("text", "ids", "reason", "next")})
        record["kl_first"] = changes[row]
    return records


def _next(tokens: Iterable[tuple[int, float]], texts: Texts) -> list[list[Any]]:
    return [[token, texts.one(token), probability] for token, probability in tokens]


@dataclass
class Sums:
    """The sums of a pass over samples.

    top: what the terminal shows of the samples that changed most; without a comparison, of the first samples
    """

    samples: int = 0
    tokens: int = 0
    changed: int = 0
    kl: float = 0.0
    top: list[dict[str, Any]] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one line of generations.jsonl."""
        self.samples += 1
        self.tokens += len(record["ids"])
        shown = {name: record[name] for name in ("split", "sample")}
        shown |= {"prompt": (record["prompt"] or "")[-_MOST_SHOWN:], "text": _beginning(record, "")}
        if "kl_first" not in record:
            if len(self.top) < SHOWN:
                self.top.append(shown)
            return
        differs = record["ids"] != record["ids_without"]
        self.changed += differs
        self.kl += record["kl_first"]
        shown |= {
            "kl": record["kl_first"],
            "differs": differs,
            "text_without": _beginning(record, "_without"),
        }
        self.top.append({**shown, "before": record["next_without"][0], "after": record["next"][0]})
        # The sort is stable: equal samples stay in the order of the data.
        self.top.sort(key=lambda each: (-each["kl"], not each["differs"]))
        del self.top[SHOWN:]

    def read(self, *, compared: bool) -> dict[str, float]:
        """The metrics: counts, and if compared, the fraction of samples that changed and the mean KL in nats."""
        found: dict[str, float] = {"samples": self.samples, "new_tokens": self.tokens}
        if compared and self.samples:
            found |= {"changed": self.changed / self.samples, "kl_first": self.kl / self.samples}
        return found

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, as plain values."""
        return {**vars(self), "top": list(self.top)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the sums by saved ones."""
        for name in vars(self):
            setattr(self, name, state[name])
        self.top = [dict(each) for each in state["top"]]


def _beginning(record: Mapping[str, Any], which: str) -> str:
    """The beginning of a continuation; its token ids if it has no text."""
    text = record[f"text{which}"]
    return (" ".join(map(str, record[f"ids{which}"][:_MOST_SHOWN])) if text is None else text)[:_MOST_SHOWN]


# ---- in the terminal -------------------------------------------------------------------------------------------


def shown_lines(sums: Sums, *, compared: bool, width: int) -> list[str]:
    """The samples that changed most, or without a comparison the first ones, in lines of at most `width` columns.

    Lines end between words; a word that is longer than the width is not split.
    """
    if not compared:
        return _continuations(sums.top, width)
    first = [each for each in sums.top if each["kl"] > 0]
    if first:
        return _changes(first, width)
    later = [each for each in sums.top if each["differs"]]
    if later:
        title = "the first new token is the same as without hooks; later tokens changed:"
        return [*_wrapped(title, width), *_continuations(later, width, compared=True)]
    return _wrapped("the hooks changed neither the first new token's probabilities nor a continuation", width)


def _continuations(samples: Iterable[Mapping[str, Any]], width: int, *, compared: bool = False) -> list[str]:
    lines = []
    for each in samples:
        lines += _wrapped(f"  {_name(each)}: {_tail(_quoted(each['prompt']), width)}", width, indent="      ")
        if compared:
            lines += _wrapped(
                f"      without: {_cut(_quoted(each['text_without']), 2 * width)}", width, indent="        "
            )
        mark = "with:   " if compared else "→"
        lines += _wrapped(f"      {mark} {_cut(_quoted(each['text']), 2 * width)}", width, indent="        ")
    return lines


def _changes(top: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    title = "first new token: the samples that changed most (KL in nats, top token without hooks → with)"
    rows = [(_name(each), f"{each['kl']:.3g}", _change(each), _quoted(each["prompt"])) for each in top]
    widths = [max(map(cell_len, column)) for column in list(zip(*rows, strict=True))[:3]]
    left = width - sum(widths) - 8
    lines = _wrapped(title, width)
    for name, kl, change, prompt in rows:
        if left >= 16:
            cells = f"  {_padded(name, widths[0])}  {kl.rjust(widths[1])}  {_padded(change, widths[2])}  "
            lines.append(f"{cells}{_tail(prompt, left)}".rstrip())
            continue
        lines += _wrapped(f"  {name}  {kl}", width)
        lines += _wrapped(f"      {change}", width, indent="      ")
    return lines


def _name(sample: Mapping[str, Any]) -> str:
    return f"{sample['split']} {sample['sample']}"


def _change(each: Mapping[str, Any]) -> str:
    (one, old, p), (two, new, q) = each["before"], each["after"]
    return f"{_token(one, old)} {p:.1%} → {_token(two, new)} {q:.1%}"


def _token(token: int, text: str | None) -> str:
    return (
        f"#{token}" if not text else _quoted(text if len(text) <= _MOST_TOKEN else f"{text[:_MOST_TOKEN]}…")
    )


def _quoted(text: str) -> str:
    """The text as a Python literal, which shows spaces at its ends and escapes control characters."""
    return repr(text)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _tail(text: str, width: int) -> str:
    """The end of a text, starting at a word, in at most `width` columns."""
    if cell_len(text) <= width:
        return text
    words = text.split(" ")
    for start in range(1, len(words)):
        if cell_len(rest := "… " + " ".join(words[start:])) <= width:
            return rest
    return ""


def _cut(text: str, most: int) -> str:
    """The first `most` characters of a text, ending at a word."""
    return text if len(text) <= most else f"{text[:most].rsplit(' ', 1)[0]} …"


def _wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
