"""Texts and spans that a `tokens` clause names are checked before a run begins, for the samples in its reach."""

from __future__ import annotations

import pytest
from small_tokenizers import tokenizer_folder
from token_samples import prompts
from torch import nn

import hookrun
from hookrun.cli import main
from hookrun.errors import CompileError
from hookrun.run.experiment import sample_checks as prepared

DECODER = ("model=decoder", "model.args={width: 16, heads: 2, layers: 1}", "task=predict")
NAMES = (*DECODER, "data=names")
ROME = {"prompt": "Rome is", "spans": {"town": "Rome", "verb": "is"}}


def capture(tokens: str, name: str = "c") -> str:
    return f"+hooks.{name}={{select: blocks.0, hook: forward, action: capture, tokens: {tokens}}}"


def test_only_texts_need_a_sound_tokenizer(tmp_path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer_config.json").write_text("{")
    model = nn.Sequential(nn.Embedding(4, 4))
    model.name_or_path = str(tmp_path)  # type: ignore[assignment]
    hook = {"select": "0", "hook": "forward", "action": "capture"}
    hookrun.compile({"c": {**hook, "tokens": -1}}, model)
    with pytest.raises(CompileError, match=r"hooks\.c\.tokens: `text` needs .* cannot be read: \w+Error"):
        hookrun.compile({"c": {**hook, "tokens": {"text": "a"}}}, model)


def test_with_another_mistake_the_tokenizer_is_not_reported(refused) -> None:
    right = capture("{text: Mary}")
    for mistake in ("train.epoch=2", "data.batch_size=0", "data.args.form=cleen"):
        said = refused(*DECODER, "data=names", mistake, right)
        assert "tokenizer" not in said, said
        assert said.startswith("1 "), said


def test_texts_are_checked_before_the_run(refused) -> None:
    for clause in ("{text: Mery}", "{position: 0, exclude: {text: Mery}}"):
        said = refused(*NAMES, capture(clause))
        assert "hooks.c.tokens.text: " in said
        assert "did you mean 'Mary'" in said
    for clause in ("{span: subjet2, missing: skip}", "{position: 0, exclude: {span: subjet2}}"):
        said = refused(*NAMES, capture(clause))
        assert "hooks.c.tokens.span: the data 'names' has no span 'subjet2'; did you mean 'subject2'" in said


def test_a_sample_without_the_span_is_named_before_the_run(refused, ready, tmp_path, monkeypatch) -> None:
    """The first one, for each hook and the task; samples beyond the reach of the run are not checked."""
    file = prompts(tmp_path, ROME, {"prompt": "Oslo"}, {"prompt": "Paris"})
    data = (*DECODER, "data=prompts", f"data.args.file={file}", "data.batch_size=1")
    verb = capture("{query: {span: verb}, key: 0}", "v").replace("blocks.0", "blocks.0.attn.pattern")
    said = refused(*data, capture("{span: town}"), verb, capture("-1", "last"))
    for place in ("hooks.c", "hooks.v"):
        assert f"{place}.tokens.span: sample 1 (prompts.jsonl:2) of the split 'val' has no span" in said
    assert "hooks.last" not in said
    for task in ("lens", "evaluate", "attribute"):
        said = refused(*data, f"task={task}", "task.tokens={span: town}")
        assert "task.tokens.span: sample 1 (prompts.jsonl:2)" in said, task
    ready(*data, capture("{span: town}"), "train.limit_batches=1")  # which meets the first sample alone
    for may_miss in ("enabled: false", "when: {step: [0]}"):
        ready(*data, capture(f"{{span: town}}, {may_miss}"))
    monkeypatch.setattr(prepared, "MOST_CHECKED", 1)
    ready(*data, capture("{span: town}"))


def test_nothing_is_read_where_no_clause_names_a_span(ready, no_data_is_read) -> None:
    clauses = ("-1", "{id: 3}", "{span: subject, missing: skip}")
    ready(*NAMES, *(capture(clause, f"c{number}") for number, clause in enumerate(clauses)))


def test_rows_of_tokens_need_the_same_position(executed, ready, refused) -> None:
    few = ("data.args.half=[3,6]", "data.batch_size=8", "train.limit_batches=1")
    data = (*DECODER, "data=repeated_tokens", *few)
    whole = "+hooks.whole={select: blocks.0, hook: forward, action: capture}"
    source = executed(*data, capture("[0, -1]"), whole).path

    def patch(taken: str, more: str = "") -> str:
        value = f"{{run: '{source}', capture: {taken}, sample: same{more}}}"
        return f"+hooks.p={{select: blocks.0, hook: forward, action: replace, tokens: -1, value: {value}}}"

    ready(*data, patch("whole", ", at: same"))
    said = refused(*data, "data.args.padding=left", patch("whole", ", at: same"))
    assert "hooks.p.value.at: " in said
    assert "data.args.padding is 'right' there and 'left' here" in said
    assert "data.args.padding" not in refused(*data, "data.args.half=[3,7]", patch("whole", ", at: same"))
    assert "it has a row for each token: capture one position" in refused(*data, patch("c"))
    said = refused("task=similarity", f"task.run={source}", "task.capture=c")
    assert "it has a row for each token: capture one position" in said


def test_a_span_that_is_there_twice_is_not_skipped(executed, ready, refused, fails, tmp_path) -> None:
    file = prompts(tmp_path, {"prompt": "a b a", "spans": {"s": "a", "t": "b"}})
    data = (*DECODER, "data=prompts", f"data.args.file={file}")
    assert executed(*data, capture("{span: t}")).captures["c"]["blocks.0"].positions.tolist() == [2]
    said = fails(*data, capture("{span: s, missing: skip}"))
    assert "span 's': a sample has its text more than once" in said
    said = refused(*data, capture("{span: s}"))
    assert "hooks.c.tokens.span: sample 0 (prompts.jsonl:1) of the split 'val' has more than once" in said
    ready(*data, "data.args.spans=null")


@pytest.mark.parametrize(
    ("kind", "spaced", "plain"),
    [
        ("byte level", {"Ġyes"}, {"yes"}),
        ("metaspace first", {"▁yes"}, {"▁yes", "yes"}),
        ("metaspace never", {"▁yes"}, {"yes"}),
        ("prepended", {"▁yes"}, {"▁yes", "yes"}),
        ("pieces", {"yes"}, {"yes"}),
    ],
)
def test_a_text_selects_its_tokens_anywhere_in_a_prompt(
    executed, tmp_path, kind: str, spaced: set[str], plain: set[str]
) -> None:
    pytest.importorskip("transformers")
    folder, tokenizer = tokenizer_folder(tmp_path / "tokenizer", kind)
    texts = ["yes is in (yes) and yes", "no yes", "yes"]
    file = prompts(tmp_path, *({"prompt": text} for text in texts))
    data = (*DECODER, "data=prompts", f"data.args.file={file}", f"data.args.tokenizer={folder}")
    tokens = [[tokenizer.id_to_token(token) for token in tokenizer.encode(text).ids] for text in texts]
    for asked, names in ((" yes", spaced), ("yes", plain)):
        rows = executed(*data, capture(f"{{text: '{asked}'}}")).captures["c"]["blocks.0"]
        wanted = []
        for sample, of_sample in enumerate(tokens):
            wanted += [(sample, place) for place, name in enumerate(of_sample) if name in names]
        assert list(zip(rows.sample_ids.tolist(), rows.positions.tolist(), strict=True)) == wanted
        assert names <= {name for of_sample in tokens for name in of_sample}


def test_the_plan_shows_the_tokens_of_the_first_prompt_s_answers(capsys, tmp_path) -> None:
    pytest.importorskip("transformers")
    folder, _ = tokenizer_folder(tmp_path / "tokenizer", "metaspace first", "$A </s>")
    lines = [
        {"prompt": "Paris is in", "answer": " yes", "wrong": "yes"},
        {"prompt": "Q:", "answer": " Mary", "wrong": "no"},
    ]
    data = ("data=prompts", f"data.args.file={prompts(tmp_path, *lines)}", f"data.args.tokenizer={folder}")
    assert main([*DECODER, "task=plan", *data, "compute.device=cpu"]) == 0
    told = capsys.readouterr().out.splitlines()
    at = told.index("prompts.jsonl:1: ' yes' → '▁yes'")
    assert told[at + 1 : at + 3] == [
        "prompts.jsonl:1: 'yes' → 'yes'",
        "prompts.jsonl:1: the prompt ends with 'n'",
    ]
    for line in told:
        assert "Mary" not in line
