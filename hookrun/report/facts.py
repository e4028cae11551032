"""The data of a run directory for its report. Parts that a failed or running run does not have are empty."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hookrun.engine.discovery import modules_named
from hookrun.engine.hook_types import HOOK_TYPES
from hookrun.errors import HookrunError, shortened
from hookrun.report.draw.text import token_name
from hookrun.report.lines import SampledLines, is_kept, sampled
from hookrun.report.sampling import stored_captures
from hookrun.store.captures.read import StoredCapture
from hookrun.store.description import named_in as named_in
from hookrun.store.files import MissingFile, StoreError, open_inside, read_json
from hookrun.store.format import (
    CAPTURES,
    CONFIG,
    ENV,
    ERROR,
    HOOKS,
    METRICS,
    MODEL,
    PICTURES,
    PLAN,
    PREDICTIONS,
    SAMPLES,
    STATS,
    STATUS,
    TOKENS,
)
from hookrun.store.manifest import read_manifest
from hookrun.store.reader import Run, open_run
from hookrun.store.records import (
    MOST_NAME,
    Count,
    EnvRecord,
    HooksRecord,
    MetricsLine,
    ModelRecord,
    Name,
    PictureLine,
    PlannedHookRecord,
    PlanRecord,
    Record,
    SampleLine,
    SiteRecord,
    StatsLine,
    TokenLine,
    typed_record,
)
from hookrun.store.run_dir import cut_off
from hookrun.store.studies import STUDIES

T = TypeVar("T")
R = TypeVar("R", bound=Record)

MOST_SITES = 10_000
"""Hooked modules whose first notice is kept even if stats.jsonl is sampled."""

MOST_HOOKS = 2_000
"""Hooks that the page shows."""

MOST_ROWS = 400
"""Rows of a table or a picture, for example of modules, unless a section has its own bound."""

MOST_SAMPLES = 2_000
"""Rows of a table of samples, which can be sorted and filtered."""

MOST_TEXT = 200_000
"""Characters shown of a text file."""

MOST_PICTURES = 2**22
"""Bytes read of pictures.jsonl."""

MOST_TOKENS = 16 * 2**20
"""Bytes read of tokens.jsonl: more tokens than a model has."""

NOTICES = frozenset({"ok", "spent"})
"""Keys of records that the page shows as notices: a check's result, a budget that is used up."""


def on_parameters(hook_type: str | None) -> bool:
    """Whether the matches of a hook type are parameters, not modules."""
    record = HOOK_TYPES.get(hook_type or "")
    return record is not None and record.on_parameters


class HookLine(StatsLine):
    """A line of stats.jsonl that says where and when it was recorded, as the page needs it."""

    module: Name
    action: Name
    mode: Name
    epoch: Count
    step: Count


@dataclass(frozen=True)
class RunData:
    """The data of one run directory.

    of_studies: id of a study's section -> the lines that its page reads of a file of the study's own
    captured, predicted: captured tensors of each hook, and the model's predictions
    traceback, composed: the texts of error.txt and of the composed configuration
    cut_off: why the run seems to have been cut off, or ``""``
    notes:   which files could not be read, and which are shown in part
    """

    path: Path
    status: dict[str, Any]
    plan: PlanRecord = field(default_factory=PlanRecord)
    model: ModelRecord = field(default_factory=ModelRecord)
    hooks: HooksRecord = field(default_factory=HooksRecord)
    env: EnvRecord = field(default_factory=EnvRecord)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: SampledLines = field(default_factory=SampledLines)
    stats: SampledLines = field(default_factory=SampledLines)
    samples: SampledLines = field(default_factory=SampledLines)
    tokens: SampledLines = field(default_factory=SampledLines)
    kept_pictures: SampledLines = field(default_factory=SampledLines)
    of_studies: dict[str, SampledLines] = field(default_factory=dict)
    captured: list[StoredCapture] = field(default_factory=list)
    predicted: list[StoredCapture] = field(default_factory=list)
    traceback: str = ""
    composed: str = ""
    cut_off: str = ""
    notes: list[str] = field(default_factory=list)

    @cached_property
    def called(self) -> dict[tuple[str, int], str]:
        """(split, sample) -> its file and class, if the run recorded them, short enough for a caption."""
        captions: dict[tuple[str, int], str] = {}
        for line in self.samples.records:
            texts = [shortened(str(line[key]), 60) for key in ("file", "class") if line.get(key)]
            captions[line["split"], line["sample"]] = " · ".join(texts)
        return captions

    @cached_property
    def pictures(self) -> dict[tuple[str, int], str]:
        """(split, sample) -> the URL of its picture, for samples of which the run kept one."""
        pictures: dict[tuple[str, int], str] = {}
        for line in self.kept_pictures.records:
            pictures[line["split"], line["sample"]] = f"data:image/png;base64,{line['png']}"
        return pictures

    @cached_property
    def sequences(self) -> dict[tuple[str, int], TokenSequence]:
        """(split, sample) -> its tokens, if the run recorded them."""
        sequences: dict[tuple[str, int], TokenSequence] = {}
        for line in self.samples.records:
            if line.get("tokens"):
                sequences[line["split"], line["sample"]] = TokenSequence.of(line, self.texts)
        return sequences

    @cached_property
    def texts(self) -> dict[int, str]:
        """Token -> its text, if the run recorded it."""
        return {line["token"]: token_name(line["text"], line["token"]) for line in self.tokens.records}

    @cached_property
    def planned(self) -> dict[str, PlannedHookRecord]:
        """Hook name -> the hook, in firing order."""
        return {hook.name: hook for hook in self.plan.hooks}

    def sees_gradients(self, hook: str) -> bool:
        """Whether the hook's values are gradients."""
        if hook not in self.planned:
            return False
        record = HOOK_TYPES.get(self.planned[hook].hook or "")
        return record is not None and record.gradient

    def picked_heads(self, hook: str) -> list[int]:
        """The numbers of the attention heads that the hook sees; empty if it sees all."""
        if hook not in self.planned:
            return []
        clause = self.planned[hook].clauses.get("heads")
        if not isinstance(clause, dict) or not isinstance(clause.get("pick"), list):
            return []
        return [head for head in clause["pick"] if isinstance(head, int)]

    def reads_inputs(self, module: str) -> bool:
        """Whether the module sees the tokens of the samples; not so in the decoder of an encoder-decoder."""
        parts = module.split(".")
        return not self.has_encoder or ("encoder" in parts and "decoder" not in parts)

    @cached_property
    def has_encoder(self) -> bool:
        """Whether the model is an encoder-decoder."""
        for path in self.classes:
            parent, _, name = path.rpartition("encoder")
            if not name and path.rpartition(".")[2] == "encoder" and f"{parent}decoder" in self.classes:
                return True
        return False

    @cached_property
    def trips(self) -> list[dict[str, Any]]:
        """The records of rules of a statistic that tripped."""
        failed = (record for record in self.stats.records if record.get("ok") is False)
        return [record for record in failed if isinstance(record.get("rule"), str)]

    @cached_property
    def sites(self) -> dict[tuple[str, str], SiteRecord]:
        """(hook, module) -> its counts."""
        return {(site.hook, site.module): site for site in self.hooks.sites}

    @cached_property
    def classes(self) -> dict[str, str]:
        """Module path -> class."""
        return {module.path: module.type for module in self.model.modules}

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.named("task") or "run"

    @property
    def source(self) -> str:
        """The run that the task analyses, instead of a model and data; ``""`` for other tasks."""
        return self.named("task", "run")

    @property
    def has_random_weights(self) -> bool:
        """Whether the results are those of a model that nothing has trained."""
        return self.model.weights == "random" and self.model.trained is False

    def named(self, section: str, key: str = "name") -> str:
        """The `name` in a section of the configuration, or the text of another key; ``""`` if there is none."""
        return named_in(self.config, section, key)


def read_facts(path: Path) -> RunData:
    """Read everything except the captured tensors. Raises StoreError if there is no run."""
    run = open_run(path)
    notes: list[str] = []
    status = _status(run, notes)

    def attempt(part: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except HookrunError as error:  # the page then has a note instead of this part
            notes.append(f"{part} can't be read: {error}")
            return otherwise

    written: Collection[str] = ()
    if sha256 := status.get("manifest"):
        written = attempt("the manifest", lambda: read_manifest(run.path, sha256), {})

    def record(part: str, name: str, model: type[R]) -> R:
        path = run.path / name
        if not os.path.lexists(path) and name not in written:
            return model()
        return attempt(part, lambda: typed_record(path, model), model())

    facts = RunData(
        path=run.path,
        status=status,
        plan=record("the plan", PLAN, PlanRecord),
        model=record("the model's tree", MODEL, ModelRecord),
        hooks=record("the hooks' counts", HOOKS, HooksRecord),
        env=record("the environment", ENV, EnvRecord),
        config=attempt("the configuration", lambda: run.config, {}),
        metrics=sampled(run.path / METRICS, MetricsLine, always=is_kept),
        stats=_records(run.path / STATS),
        samples=sampled(run.path / SAMPLES, SampleLine),
        tokens=sampled(run.path / TOKENS, TokenLine, limit=MOST_TOKENS),
        kept_pictures=sampled(run.path / PICTURES, PictureLine, limit=MOST_PICTURES, from_start=True),
        captured=attempt(f"{CAPTURES}/", lambda: stored_captures(run.path / CAPTURES), []),
        predicted=attempt(f"{PREDICTIONS}/", lambda: stored_captures(run.path / PREDICTIONS), []),
        traceback=attempt(ERROR, lambda: _text(run.path / ERROR), ""),
        composed=attempt(CONFIG, lambda: _text(run.path / CONFIG), ""),
        cut_off=cut_off(status),
        notes=notes,
    )
    for lines in vars(facts).values():
        if isinstance(lines, SampledLines):
            notes += lines.notes
    for page in modules_named(STUDIES, "page"):
        if hasattr(page, "read"):
            facts.of_studies[page.ID] = page.read(run.path)
            notes += facts.of_studies[page.ID].notes
    if len(facts.planned) > MOST_HOOKS:
        notes.append(f"the plan has {len(facts.planned):,} hooks: the first {MOST_HOOKS:,} are shown")
    return facts


def _status(run: Run, notes: list[str]) -> dict[str, Any]:
    """The content of status.json; if it is not valid, only its status word, and a note. StoreError without the word."""
    try:
        return run.status
    except StoreError as error:
        try:
            status = read_json(run.path / STATUS)
        except StoreError:
            raise error from None
        if not isinstance(status, dict) or not isinstance(status.get("status"), str):
            raise StoreError(f"{run.path / STATUS} says no status") from error
        notes.append(f"the status can't be read: {error}")
        return {"status": status["status"][:MOST_NAME]}


def _text(path: Path) -> str:
    """The beginning of a text file of the run; ``""`` if it does not exist. StoreError for a link or a pipe."""
    try:
        with open_inside(path) as file:
            content = file.read(4 * MOST_TEXT + 1).decode("utf-8", errors="replace")
    except MissingFile:
        return ""
    if len(content) > MOST_TEXT:
        content = content[:MOST_TEXT] + "\n… (cut off here)"
    return content


def _records(path: Path) -> SampledLines:
    """The records of stats.jsonl; if it is sampled, with the first notice of each hook at each module."""
    seen = set[tuple[str, str]]()

    def is_first_notice(record: Mapping[str, Any]) -> bool:
        if NOTICES.isdisjoint(record) or record.get("ok") is True:
            return False
        site = str(record.get("hook")), f"{record.get('module')}{record.get('path')}"
        if site in seen or len(seen) == MOST_SITES:
            return False
        seen.add(site)
        return True

    return sampled(path, HookLine, always=is_first_notice)


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of one sample.

    ids:     its tokens, without padding
    before:  number of padding tokens before them
    width:   length of the batch's sequences, including padding
    targets: the target token at each position; None: no target
    texts:   token -> its text
    """

    ids: tuple[int, ...]
    before: int
    width: int
    targets: tuple[int | None, ...]
    texts: Mapping[int, str]

    @classmethod
    def of(cls, line: Mapping[str, Any], texts: Mapping[int, str]) -> TokenSequence:
        """From a line of samples.jsonl that has tokens."""
        ids = tuple(line["tokens"])
        targets = tuple(line.get("targets") or ())
        before, after = line.get("padding", (0, 0))
        if len(targets) != len(ids):
            targets = (None,) * len(ids)
        return cls(ids, before, before + len(ids) + after, targets, texts)

    def name(self, token: int) -> str:
        """The text of a token, or its number if the text is not known."""
        return self.texts.get(token) or f"#{token}"

    @property
    def names(self) -> list[str]:
        """The name of each of its tokens."""
        return [self.name(token) for token in self.ids]
