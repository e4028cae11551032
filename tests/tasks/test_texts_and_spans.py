"""Texts and spans that a `tokens` clause names are checked before a run begins, for the samples in its reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from token_samples import prompts
from torch import nn

import hookrun
from hookrun.errors import CompileError
from hookrun.spec import Settings
from hookrun.tasks import parse_experiment
from hookrun.tasks.run import prepare as prepared
from hookrun.tasks.run.prepare import missing_spans

DECODER = ("model=decoder", "model.args={width: 16, heads: 2, layers: 1}", "task=predict")
NAMES = (*DECODER, "data=names")
ROME = {"prompt": "Rome is", "spans": {"town": "Rome", "verb": "is"}}

Refused = Callable[..., str]


def capture(tokens: str) -> str:
    return f"+hooks.c={{select: blocks.0, hook: forward, action: capture, tokens: {tokens}}}"


def test_a_damaged_tokenizer_beside_the_model_is_an_error_for_texts_only(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer_config.json").write_text("{")
    model = nn.Sequential(nn.Embedding(4, 4))
    model.name_or_path = str(tmp_path)  # type: ignore[assignment]
    hook = {"select": "0", "hook": "forward", "action": "capture"}
    hookrun.compile({"c": {**hook, "tokens": -1}}, model)
    with pytest.raises(CompileError, match=r"hooks\.c\.tokens: `text` needs .* cannot be read: \w+Error"):
        hookrun.compile({"c": {**hook, "tokens": {"text": "a"}}}, model)


def test_with_another_mistake_the_tokenizer_is_not_reported(refused: Refused) -> None:
    right = capture("{text: Mary}")
    for mistake in ("train.epoch=2", "data.batch_size=0", "data.args.form=cleen"):
        said = refused(*DECODER, "data=names", mistake, right)
        assert "tokenizer" not in said and said.startswith("1 "), said


def test_texts_and_spans_are_checked_before_the_run_also_in_exclude(refused: Refused) -> None:
    for clause in ("{text: Mery}", "{position: 0, exclude: {text: Mery}}"):
        said = refused(*NAMES, capture(clause))
        assert "hooks.c.tokens.text: " in said and "did you mean 'Mary'" in said
    for clause in ("{span: subjet2, missing: skip}", "{position: 0, exclude: {span: subjet2}}"):
        said = refused(*NAMES, capture(clause))
        assert "hooks.c.tokens.span: the data 'names' has no span 'subjet2'; did you mean 'subject2'" in said


def test_a_sample_without_the_span_is_named_before_the_run(refused, ready, tmp_path) -> None:
    file = prompts(tmp_path, ROME, {"prompt": "Oslo"}, {"prompt": "Paris"})
    data = (*DECODER, "data=prompts", f"data.args.file={file}", "data.batch_size=1")
    assert "hooks.c.tokens.span: sample 1 (prompts.jsonl:2)" in refused(*data, capture("{span: town}"))
    for task in ("lens", "evaluate", "attribute"):
        said = refused(*data, f"task={task}", "task.tokens={span: town}")
        assert "task.tokens.span: sample 1 (prompts.jsonl:2)" in said, task
    ready(*data, capture("{span: town}"), "train.limit_batches=1")  # which meets the first sample alone
    for may_miss in ("enabled: false", "when: {step: [0]}"):
        ready(*data, capture(f"{{span: town}}, {may_miss}"))


def test_rows_of_tokens_are_used_if_both_runs_have_them_at_the_same_position(
    executed, ready, refused
) -> None:
    few = ("data.args.half=[3,6]", "data.batch_size=8", "train.limit_batches=1")
    data = (*DECODER, "data=repeated_tokens", *few)
    whole = "+hooks.whole={select: blocks.0, hook: forward, action: capture}"
    source = executed(*data, capture("[0, -1]"), whole).path

    def patch(taken: str, more: str = "") -> str:
        value = f"{{run: '{source}', capture: {taken}, sample: same{more}}}"
        return f"+hooks.p={{select: blocks.0, hook: forward, action: replace, tokens: -1, value: {value}}}"

    ready(*data, patch("whole", ", at: same"))
    said = refused(*data, "data.args.padding=left", patch("whole", ", at: same"))
    assert "hooks.p.value.at: " in said and "data.args.padding is 'right' there and 'left' here" in said
    assert "data.args.padding" not in refused(*data, "data.args.half=[3,7]", patch("whole", ", at: same"))
    assert "it has a row for each token: capture one position" in refused(*data, patch("c"))
    said = refused("task=similarity", f"task.run={source}", "task.capture=c")
    assert "it has a row for each token: capture one position" in said


def test_a_span_that_is_there_twice_is_not_skipped(executed, ready, fails, tmp_path) -> None:
    file = prompts(tmp_path, {"prompt": "a b a", "spans": {"s": "a", "t": "b"}})
    data = (*DECODER, "data=prompts", f"data.args.file={file}")
    assert executed(*data, capture("{span: t}")).captures["c"]["blocks.0"].positions.tolist() == [2]
    said = fails(*data, capture("{span: s, missing: skip}"))
    assert "span 's': a sample has its text more than once" in said
    ready(*data, "data.args.spans=null")


def settings_of(tmp_path: Path, *lines: object) -> Settings:
    data = {"name": "prompts", "args": {"file": prompts(tmp_path, *lines)}}
    whole = {"task": {"name": "predict"}, "model": {"name": "decoder"}, "data": data}
    return parse_experiment(whole).settings


def lacking(of: Settings, samples: int | None, *clauses: Any) -> list[str]:
    hook = {"select": "blocks.0", "hook": "forward", "action": "capture"}
    made = {f"h{number}": {**hook, "tokens": clause} for number, clause in enumerate(clauses)}
    asked = [(hook.keys.tokens, hook.where) for hook in hookrun.load_spec({"hooks": made}).hooks]
    return [f"{each.where}: {each.what}" for each in missing_spans(asked, of, "val", samples)]


def test_each_hook_with_a_missing_span_is_told_with_the_first_sample_without_it(tmp_path: Path) -> None:
    of = settings_of(tmp_path, ROME, {"prompt": "Oslo is", "spans": {"verb": "is"}}, {"prompt": "Paris"})
    town, verb = {"span": "town"}, {"query": {"span": "verb"}, "key": 0}
    assert lacking(of, 3, town, -1, verb, town) == [
        "hooks.h0.tokens.span: sample 1 (prompts.jsonl:2) of the split 'val' has no span 'town'",
        "hooks.h2.tokens.span: sample 2 (prompts.jsonl:3) of the split 'val' has no span 'verb'",
        "hooks.h3.tokens.span: sample 1 (prompts.jsonl:2) of the split 'val' has no span 'town'",
    ]


def test_a_span_that_is_there_twice_is_refused_only_where_it_is_used(tmp_path: Path) -> None:
    twice = {"prompt": "Rome and Rome is", "spans": {"town": "Rome", "verb": "is", "none": None}}
    of = settings_of(tmp_path, twice, {"prompt": "Rome", "spans": None})
    assert lacking(of, 1, {"span": "verb"}, -1) == []
    (said,) = lacking(of, 2, {"span": "town"})
    assert said.startswith("hooks.h0.tokens.span: sample 0 (prompts.jsonl:1) of the split 'val'")
    assert said.endswith("has more than once the text of the span 'town'")


@pytest.mark.parametrize("samples, found", [(None, 0), (0, 0), (1, 0), (2, 1), (9, 1)])
def test_only_samples_in_reach_are_checked_and_at_most_so_many(
    samples: int | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = settings_of(tmp_path, ROME, {"prompt": "Oslo"})
    assert len(lacking(of, samples, {"span": "town"})) == found
    monkeypatch.setattr(prepared, "MOST_CHECKED", 1)
    assert lacking(of, samples, {"span": "town"}) == []


def test_nothing_is_read_where_no_clause_names_a_span(tmp_path, monkeypatch) -> None:
    of = settings_of(tmp_path, ROME)
    monkeypatch.setattr(prepared.data, "load", lambda *_, **__: pytest.fail("the data is read"))
    assert lacking(of, 1, -1, {"id": 3}, {"span": "town", "missing": "skip"}) == []
