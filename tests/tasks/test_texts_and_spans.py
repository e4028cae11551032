"""What the texts and the spans of a `tokens` clause may name is checked before a run begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import hookrun
from hookrun.errors import CompileError

DECODER = (
    "model=decoder",
    "model.args.width=16",
    "model.args.heads=2",
    "model.args.layers=1",
    "task=predict",
)
NAMES = (*DECODER, "data=names")

Refused = Callable[..., str]


def capture(tokens: str) -> str:
    return f"+hooks.c={{select: blocks.0, hook: forward, action: capture, tokens: {tokens}}}"


def test_a_word_that_the_tokenizer_does_not_know_is_refused_with_the_nearest(refused: Refused) -> None:
    for tokens in ("{text: Mery}", "{position: 0, exclude: {text: Mery}}"):
        said = refused(*NAMES, capture(tokens))
        assert "hooks.c.tokens.text: " in said and "did you mean 'Mary'" in said


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
    assert "did you mean 'Mary'" in refused(*NAMES, capture("{text: Mery}"))


def test_a_sample_without_the_span_is_named_before_the_run(refused, ready, tmp_path) -> None:
    prompts = [{"prompt": "Rome is", "spans": {"town": "Rome"}}, {"prompt": "Oslo"}, {"prompt": "Paris"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    data = (*DECODER, "data=prompts", "data.args.file=p.jsonl", "data.batch_size=1")
    said = refused(*data, capture("{span: town}"))
    assert "hooks.c.tokens.span: sample 1 (p.jsonl:2) of the split 'val' has no span 'town'" in said
    assert "missing: skip" in said
    for task in ("lens", "evaluate", "attribute"):
        said = refused(*data, f"task={task}", "task.tokens={span: town}")
        assert "task.tokens.span: sample 1 (p.jsonl:2)" in said, task
    ready(*data, capture("{span: town, missing: skip}"))
    ready(*data, capture("{span: town}"), "train.limit_batches=1")  # which meets the first sample alone


def test_a_span_that_the_data_does_not_have_is_refused_before_the_run(refused: Refused) -> None:
    for tokens in (
        "{span: subjet2}",
        "{span: subjet2, missing: skip}",
        "{position: 0, exclude: {span: subjet2}}",
    ):
        said = refused(*NAMES, capture(tokens))
        assert "hooks.c.tokens.span: the data 'names' has no span 'subjet2'; did you mean 'subject2'" in said
    images = ("data=digits", "model=mlp")
    said = refused(*images, capture("{span: subject2}").replace("blocks.0", "'**'"))
    assert "hooks.c.tokens.span: there is no span 'subject2': the samples of" in said


def test_rows_of_tokens_are_used_if_both_runs_have_them_at_the_same_position(run, ready, refused) -> None:
    data = (
        *DECODER,
        "data=repeated_tokens",
        "data.args.half=[3,6]",
        "data.batch_size=8",
        "train.limit_batches=1",
    )
    both = (
        capture("[0, -1]"),
        capture("[0, -1]").replace("hooks.c", "hooks.whole").replace(", tokens: [0, -1]", ""),
    )
    source = run(*data, *both).path

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
    (tmp_path / "p.jsonl").write_text('{"prompt": "a b a", "spans": {"s": "a", "t": "b"}}\n')
    data = ("task=predict", "model=decoder", "data=prompts", "data.args.file=p.jsonl")
    assert executed(*data, capture("{span: t}")).captures["c"]["blocks.0"].positions.tolist() == [2]
    said = fails(*data, capture("{span: s, missing: skip}"))
    assert "span 's': a sample has its text more than once" in said
    ready(*data, "data.args.spans=null")
