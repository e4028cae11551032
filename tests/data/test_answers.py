"""Answers of prompts: their tokens are those behind the prompt's, in the tokenizer's own file, or they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_tokenizers import END, KINDS, START, tokenizer_folder
from token_samples import made, prompts, real, refusal

pytest.importorskip("transformers")

ENDED = f"{START} $A {END}"
PAIRS = [
    ("Q:", " yes", " Paris"),
    ("Paris is in", " no", " yes"),
    ("yes is Q:", " Paris no", " yes no"),
]


@pytest.mark.parametrize("around", ["$A", f"{START} $A", ENDED])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_tokens_of_the_whole_text(tmp_path: Path, kind: str, around: str) -> None:
    folder, tokenizer = tokenizer_folder(tmp_path / "tokenizer", kind, around)
    start = [tokenizer.token_to_id(START)] if START in around else []
    for prompt, answer, wrong in PAIRS:
        line = {"prompt": prompt, "answer": answer, "wrong": wrong}
        info, samples = made("prompts", file=prompts(tmp_path, line), tokenizer=folder)
        ids, targets = real(samples[0])
        own = tokenizer.encode(prompt, add_special_tokens=False).ids
        assert ids == [*start, *own]
        [wrong_token] = samples.wrong(torch.tensor([0]))  # type: ignore[misc]
        for given, token in ((answer, targets[-1]), (wrong, int(wrong_token))):
            both = tokenizer.encode(prompt + given, add_special_tokens=False).ids
            assert both[: len(own)] == own
            assert both[len(own)] == token
        assert list(info.remarks()) == [
            f"prompts.jsonl:1: {answer!r} → {tokenizer.id_to_token(targets[-1])!r}",
            f"prompts.jsonl:1: {wrong!r} → {tokenizer.id_to_token(int(wrong_token))!r}",
            f"prompts.jsonl:1: the prompt ends with {tokenizer.id_to_token(own[-1])!r}",
        ]


@pytest.mark.parametrize("kind", ["byte level", "metaspace first", "metaspace always", "metaspace never"])
def test_a_leading_space_makes_another_target(tmp_path: Path, kind: str) -> None:
    folder, tokenizer = tokenizer_folder(tmp_path / "tokenizer", kind)
    file = prompts(tmp_path, {"prompt": "Q:", "answer": "yes", "wrong": " yes"})
    info, samples = made("prompts", file=file, tokenizer=folder)
    space = "Ġ" if kind == "byte level" else "▁"
    told = list(info.remarks())[:2]
    assert told == ["prompts.jsonl:1: 'yes' → 'yes'", f"prompts.jsonl:1: ' yes' → '{space}yes'"]
    wrong = samples.wrong(torch.tensor([0]))
    assert wrong is not None
    assert tokenizer.id_to_token(int(wrong)) == f"{space}yes"
    assert tokenizer.id_to_token(real(samples[0])[1][-1]) == "yes"


def test_a_tokenizer_that_drops_spaces_has_one_target_for_both(tmp_path: Path) -> None:
    folder, _ = tokenizer_folder(tmp_path / "tokenizer", "pieces")
    file = prompts(tmp_path, {"prompt": "Q:", "answer": "yes", "wrong": " yes"})
    assert "begin with the same token, 'yes'" in refusal("prompts", file=file, tokenizer=folder)


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "alone", "together"),
    [
        ("byte level", "Q: ", "yes", "'Q' ':' 'Ġ'", "'Q' ':' 'Ġyes'"),
        ("metaspace first", "Q: ", "yes", "'▁Q:' '▁'", "'▁Q:' '▁yes'"),
        ("prepended", "Q:", "yes", "'▁Q:'", "'▁Q:yes'"),
        ("words", "Q:", "yes", "'Q:'", "'<unk>'"),
        # the word that neither knows is one token, alone and together
        ("words", "is Rome", "Rome is", "'is' '<unk>'", "'is' '<unk>' 'is'"),
    ],
)
def test_a_token_across_prompt_plus_answer_is_refused(
    tmp_path: Path, kind: str, prompt: str, answer: str, alone: str, together: str
) -> None:
    folder, _ = tokenizer_folder(tmp_path / "tokenizer", kind, f"{START} $A")
    good = {"prompt": "Q:", "answer": " yes", "wrong": " no"}
    bad = {"prompt": prompt, "answer": answer, "wrong": " no"}
    said = refusal("prompts", file=prompts(tmp_path, good, bad), tokenizer=folder)
    assert "data.args.answer: " in said
    assert "prompts.jsonl line 2: 'answer' does not begin" in said
    assert f"the prompt ends with '<s>' {alone}, and the answer makes it '<s>' {together}" in said


def test_a_wrong_answer_is_refused_as_a_right_one_is(tmp_path: Path) -> None:
    folder, _ = tokenizer_folder(tmp_path / "tokenizer", "prepended")
    file = prompts(tmp_path, {"prompt": "Q:", "answer": " yes", "wrong": "yes"})
    said = refusal("prompts", file=file, tokenizer=folder)
    assert "data.args.wrong: " in said
    assert "ends with '▁Q:', and the answer makes it '▁Q:yes'" in said


def test_an_end_token_that_is_written_in_the_prompt_stays(tmp_path: Path) -> None:
    folder, tokenizer = tokenizer_folder(tmp_path / "tokenizer", "byte level", ENDED)
    file = prompts(tmp_path, {"prompt": "Q:</s>", "answer": " yes"})
    ids, targets = real(made("prompts", file=file, tokenizer=folder)[1][0])
    assert [tokenizer.id_to_token(each) for each in ids] == [START, "Q", ":", END]
    assert tokenizer.id_to_token(targets[-1]) == "Ġyes"
    without = real(made("prompts", file=file, tokenizer=folder, special_tokens=False)[1][0])[0]
    assert without == ids[1:]


def test_a_prompt_without_an_answer_keeps_its_end(tmp_path: Path) -> None:
    folder, tokenizer = tokenizer_folder(tmp_path / "tokenizer", "byte level", ENDED)
    info, samples = made("prompts", file=prompts(tmp_path, {"prompt": "Q:"}), tokenizer=folder)
    assert real(samples[0])[0] == tokenizer.encode("Q:").ids
    assert list(info.remarks()) == []


def test_an_answer_of_an_encoder_decoder_is_a_text_of_its_own(tmp_path: Path) -> None:
    folder, tokenizer = tokenizer_folder(tmp_path / "tokenizer", "metaspace first", f"$A {END}")
    file = prompts(tmp_path, {"prompt": "Q:", "answer": "yes no", "wrong": "maybe"})
    info, samples = made("prompts", file=file, tokenizer=folder, labels=True)
    inputs, _ = samples[0]
    assert inputs["labels"].tolist() == tokenizer.encode("yes no", add_special_tokens=False).ids
    assert real(samples[0])[0] == tokenizer.encode("Q:").ids  # the encoder sees its end
    assert "prompts.jsonl:1: the prompt ends with '</s>'" in info.remarks()


def test_a_start_token_alone_may_be_a_prompt(tmp_path: Path) -> None:
    folder, tokenizer = tokenizer_folder(tmp_path / "started", "byte level", f"{START} $A")
    file = prompts(tmp_path, {"prompt": "", "answer": "Paris"})
    assert real(made("prompts", file=file, tokenizer=folder)[1][0])[0] == [tokenizer.token_to_id(START)]
    for around in (ENDED, f"$A {END}"):  # of an end it can't be said that nothing stands before it
        ended, _ = tokenizer_folder(tmp_path / "ended", "byte level", around)
        said = refusal("prompts", file=file, tokenizer=ended)
        assert (
            f"the prompt ends with {repr(START) + ' ' if START in around else ''}'</s>', and the answer makes it"
            in said
        )
