"""Samples without a span that a clause `tokens` names are found before the run, as far as hooks will see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from token_samples import prompts

import hookrun
from hookrun.errors import CompileError
from hookrun.spec import Settings
from hookrun.tasks import parse_experiment
from hookrun.tasks.loop import spans
from hookrun.tasks.loop.spans import check_spans

ROME = {"prompt": "Rome is", "spans": {"town": "Rome", "verb": "is"}}


def settings(tmp_path: Path, *lines: object) -> Settings:
    data = {"name": "prompts", "args": {"file": prompts(tmp_path, *lines)}}
    return parse_experiment(
        {"task": {"name": "predict"}, "model": {"name": "decoder"}, "data": data}
    ).settings


def refused(of: Settings, samples: int | None, *clauses: Any, **keys: Any) -> list[str]:
    hook = {"select": "blocks.0", "hook": "forward", "action": "capture", **keys}
    made = {f"h{number}": {**hook, "tokens": clause} for number, clause in enumerate(clauses)}
    try:
        check_spans(hookrun.load_spec({"hooks": made}).hooks, of, "val", samples)
    except CompileError as error:
        return [f"{each.where}: {each.what}" for each in error.errors]
    return []


def test_each_hook_with_a_missing_span_is_told_with_the_first_sample_without_it(tmp_path: Path) -> None:
    of = settings(tmp_path, ROME, {"prompt": "Oslo is", "spans": {"verb": "is"}}, {"prompt": "Paris"})
    town, verb = {"span": "town"}, {"query": {"span": "verb"}, "key": 0}
    assert refused(of, 3, town, -1, verb, town) == [
        "hooks.h0.tokens.span: sample 1 (prompts.jsonl:2) of the split 'val' has no span 'town'",
        "hooks.h2.tokens.span: sample 2 (prompts.jsonl:3) of the split 'val' has no span 'verb'",
        "hooks.h3.tokens.span: sample 1 (prompts.jsonl:2) of the split 'val' has no span 'town'",
    ]


def test_clauses_that_do_not_need_the_span_and_hooks_that_may_not_see_the_sample_are_not_checked(
    tmp_path: Path,
) -> None:
    of, town = settings(tmp_path, ROME, {"prompt": "Oslo"}), {"span": "town"}
    assert len(refused(of, 2, town)) == 1
    assert refused(of, 2, {**town, "missing": "skip"}, {"position": 0, "exclude": town}, None) == []
    assert refused(of, 2, town, enabled=False) == refused(of, 2, town, when={"step": [0]}) == []


@pytest.mark.parametrize("samples, found", [(None, 0), (0, 0), (1, 0), (2, 1), (9, 1)])
def test_only_samples_in_reach_are_checked_and_at_most_so_many(
    samples: int | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = settings(tmp_path, ROME, {"prompt": "Oslo"})
    assert len(refused(of, samples, {"span": "town"})) == found
    monkeypatch.setattr(spans, "MOST_SAMPLES", 1)
    assert refused(of, samples, {"span": "town"}) == []


def test_nothing_is_read_where_no_clause_names_a_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = settings(tmp_path, ROME)
    monkeypatch.setattr(spans.data, "load", lambda *_, **__: pytest.fail("the data is read"))
    assert refused(of, 1, -1, {"id": 3}, {"span": "town", "missing": "skip"}) == []
