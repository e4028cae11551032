"""Runs on sequences of tokens: losses and metrics by token, for any padding and batch size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_tokenizers import tokenizer_folder
from torch.nn import functional as F

import hookrun
from hookrun.data.samples import IGNORED
from hookrun.run.passes.batches import Batches
from hookrun.store.reader import Run

Runs = Callable[..., Run]

DECODER = ("model=decoder", "model.args.width=16", "model.args.heads=2", "model.args.layers=1")
GPT2 = "{model_type: gpt2, n_layer: 1, n_embd: 16, n_head: 2, vocab_size: null, bos_token_id: 0, eos_token_id: 0}"
TRANSFORMERS = ("model=transformers", f"model.args.config={GPT2}")
AT_3 = "task.tokens='3:'"
PROMPTS = [
    {"prompt": "Paris is in", "answer": "F", "wrong": "I", "spans": {"subject": "Paris"}},
    {"prompt": "Rome", "answer": "I", "wrong": "F", "spans": {"subject": "Rome"}},
    {"prompt": "The town of Lyon is in", "answer": "F", "wrong": "I", "spans": {"subject": [12, 16]}},
    {"prompt": "Pisa is in the country of", "answer": "I", "wrong": "F"},
]


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str, ...]:
    """Overrides for a file of prompts."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return "data=prompts", "data.args.file=prompts.jsonl"


@pytest.fixture
def text(tmp_path: Path) -> tuple[str, ...]:
    """Overrides for a file of text of lines of different lengths."""
    lines = [f"{'a text of words ' * (1 + number % 3)}{number}" for number in range(10)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return "data=text", "data.args.file=text.txt", "data.args.packed=false"


@pytest.mark.parametrize("model", [DECODER, TRANSFORMERS], ids=["decoder", "transformers"])
@pytest.mark.parametrize(
    ("first", "task"),
    [
        (0, ("task=evaluate",)),
        (3, ("task=evaluate", AT_3)),
        (3, ("task=predict", "task.metrics=[loss]", AT_3)),
    ],
)
def test_the_loss_is_that_of_the_prompts_one_by_one(
    executed, ready, prompts, model: tuple[str, ...], first: int, task: tuple[str, ...]
) -> None:
    """At all tokens, or at those that `task.tokens` names: from the fourth one on."""
    common = (*task, *model, *prompts, "data.args.answer=null", "data.args.wrong=null")
    one_by_one = ready(*common, "data.batch_size=1")
    losses = list[float]()
    for batch in Batches(one_by_one, "val").epoch(0):
        with torch.no_grad():
            output = one_by_one.model.eval()(**batch.inputs)
        scores = output if isinstance(output, torch.Tensor) else output.logits
        kept = (batch.target != IGNORED) & (torch.arange(batch.target.shape[1]) >= first)
        losses += F.cross_entropy(scores[kept], batch.target[kept], reduction="none").tolist()
    for padding, size in (("right", 3), ("left", 4)):
        found = executed(*common, f"data.args.padding={padding}", f"data.batch_size={size}")
        assert value(found) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_next_token_is_the_loss_of_transformers(executed, ready, text) -> None:
    common = ("task=evaluate", *TRANSFORMERS, *text, "data.args.val_fraction=1", "data.batch_size=4")
    for tokens in ((), ("task.tokens='-9:'",)):  # the loss that the model computes is that of all tokens
        own = value(executed(*common, "train.loss=output", "data.args.labels=true", *tokens))
        assert own == pytest.approx(value(executed(*common)), rel=1e-6)
    smoothed = ready(*common, "train.loss={name: next_token, label_smoothing: 0.1}").loss
    scores = torch.randn(1, 5, 9)
    target = torch.tensor([[IGNORED, 3, 8, 0, 5]])
    expected = F.cross_entropy(scores[0], target[0], ignore_index=IGNORED, label_smoothing=0.1)
    torch.testing.assert_close(smoothed(scores, target), expected)


def test_micro_batches_of_different_lengths_are_one_batch(executed: Runs, text: tuple[str, ...]) -> None:
    common = (*DECODER, *text, "train.steps=1", "train.shuffle=false", "train.optimizer={name: SGD, lr: 0.5}")
    whole, parts = (
        load_file(executed(*common, *more).path / "checkpoints" / "last.safetensors")
        for more in (("data.batch_size=4",), ("data.batch_size=2", "train.accumulate=2"))
    )
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], atol=1e-6, rtol=1e-5)


def test_tokens_are_not_taken_for_classes(executed: Runs) -> None:
    """A length that equals the vocabulary: [batch, length, vocabulary] would fit [batch, classes, length] too."""
    data = ("data=repeated_tokens", "data.args={vocab_size: 17, half: [8, 8], val_size: 20}")
    found = executed("task=evaluate", *DECODER, *data)
    model, samples = hookrun.build(overrides=[*DECODER, *data, "compute.device=cpu"])
    batch = next(iter(samples.loader("val")))
    with torch.no_grad():
        scores = model.eval()(**batch.inputs)
    kept = batch.target != IGNORED
    assert value(found) == pytest.approx(float(F.cross_entropy(scores[kept], batch.target[kept])), rel=1e-5)
    right = (scores[kept].argmax(-1) == batch.target[kept]).float().mean()
    assert value(found, "accuracy") == pytest.approx(float(right))


@pytest.mark.parametrize("kind", ["metaspace first", "prepended"])
def test_the_logit_difference_is_behind_the_prompt(executed, ready, tmp_path, kind: str) -> None:
    """With and without a space: the tokens that the tokenizer itself makes of prompt and answer."""
    pytest.importorskip("transformers")
    folder, tokenizer = tokenizer_folder(tmp_path / "tokenizer", kind, "<s> $A </s>")
    pairs = [("Q:", " yes", " no"), ("Paris is in (", "yes", " yes"), ("When Mary and", " Mary", " yes")]
    lines = [{"prompt": prompt, "answer": right, "wrong": wrong} for prompt, right, wrong in pairs]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = ("data=prompts", "data.args.file=p.jsonl", f"data.args.tokenizer={folder}", "data.batch_size=2")
    common = ("task=evaluate", *TRANSFORMERS, *data, "task.metrics=[logit_difference]")
    model = ready(*common).model.eval()
    expected = list[float]()
    for prompt, *answers in pairs:
        start = [0, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        with torch.no_grad():
            scores = model(torch.tensor([start])).logits[0, -1]
        right, wrong = (
            tokenizer.encode(prompt + answer, add_special_tokens=False).ids[len(start) - 1]
            for answer in answers
        )
        assert right != wrong
        expected.append(float(scores[right] - scores[wrong]))
    for padding in ("right", "left"):
        found = value(executed(*common, f"data.args.padding={padding}"), "logit_difference")
        assert found == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_a_batch_has_the_spans_of_its_samples(prompts: tuple[str, ...]) -> None:
    overrides = [*DECODER, *prompts, "data.batch_size=3", "data.args.padding=left", "compute.device=cpu"]
    _, data = hookrun.build(overrides=["task=evaluate", *overrides])
    assert data.info.spans == ("subject",)
    assert data.info.tokenizer is not None
    first, second = list(data.loader("val"))
    assert first.spans["subject"].tolist() == [[0, 5], [0, 4], [12, 16]]
    assert second.spans["subject"].tolist() == [[-1, -1]]
    assert first.wrong is not None
    assert data.info.tokenizer.tokens(first.wrong.tolist()) == ["I", "F", "I"]
    assert [int(each) for each in first.weight.reshape(1)] == [3]  # one answer for each sample


def test_settings_that_do_not_fit_tokens_are_refused(refused, prompts) -> None:
    small = refused("task=evaluate", *DECODER, *prompts, "train.loss=mse", "model.args.vocab_size=100")
    assert "train.loss: 'mse' does not compare" in small
    assert "next_token" in small
    assert "the model has 100 tokens, and the data has 256" in small
    assert "the data set's samples have no known shape" in refused("task=evaluate", "model=cnn", *prompts)
    assert "none of the 4 prompts" in refused(*DECODER, *prompts)  # train, while all samples are in val


T5 = (
    "{model_type: t5, num_layers: 1, num_decoder_layers: 1, d_model: 16, d_kv: 4, num_heads: 4, d_ff: 32, "
    "vocab_size: 300, decoder_start_token_id: 299, pad_token_id: 0, eos_token_id: 1}"
)
ANSWERS = [
    {"prompt": "a b", "answer": "xyz", "spans": {"s": "a"}},
    {"prompt": "a bcd", "answer": "z", "spans": {"s": "bc"}},
]


@pytest.fixture
def seq2seq(tmp_path: Path) -> tuple[str, ...]:
    """Overrides for a T5 of random weights on two prompts with answers of different lengths."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, ANSWERS)))
    model = ("model=transformers", f"model.args.config={T5}", "model.args.class=seq2seq_lm")
    data = ("data=prompts", "data.args.file=prompts.jsonl", "data.args.labels=true")
    return *model, *data, "train.loss=output", "task=evaluate"


def capture(select: str, tokens: str) -> str:
    return f"+hooks.c={{select: {select}, hook: forward, action: capture, tokens: {tokens}}}"


def captured(run: Run) -> Any:
    return next(iter(run.captures["c"].values()))


def test_the_padding_of_an_answer_is_not_a_token_of_the_decoder(executed, seq2seq) -> None:
    rows = {}
    for side in ("right", "left"):
        found = captured(
            executed(*seq2seq, f"data.args.padding={side}", capture("decoder.block.0.layer.2", "all"))
        )
        assert found.sample_ids.tolist() == [0, 0, 0, 1]
        assert found.positions.tolist() == [0, 1, 2, 0]
        if side == "right":  # the token that begins an answer is none of the tokenizer's
            assert found.token_ids.tolist() == [299, *b"xy", 299]
            assert list(found.text) == ["", "x", "y", ""]
        rows[side] = found[:]
    torch.testing.assert_close(rows["left"], rows["right"], atol=1e-6, rtol=1e-5)


def test_spans_select_the_encoders_tokens(executed, refused, seq2seq) -> None:
    modules = "[encoder.block.0.layer.1, decoder.block.0.layer.1.EncDecAttention.k]"
    captures = executed(*seq2seq, capture(modules, "{span: s}")).captures["c"]
    assert len(captures) == 2
    for found in captures.values():
        assert found.sample_ids.tolist() == [0, 1, 1]
        assert found.positions.tolist() == [0, 2, 3]
        assert found.token_ids.tolist() == list(b"abc")
    said = refused(*seq2seq, capture("decoder.block.0.layer.2", "{position: 0, exclude: {span: s}}"))
    assert "hooks.c" in said
    assert "spans refer to the encoder's tokens" in said


def test_labels_tell_the_padding_of_the_decoder() -> None:
    overrides = ["model=transformers", f"model.args.config={T5}", "model.args.class=seq2seq_lm", "data=names"]
    model, _ = hookrun.build(overrides=[*overrides, "compute.device=cpu"])
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    labels = torch.tensor([[120, 121, 122, 1], [130, 1, -100, -100]])
    hooks = {
        "c": {"select": "decoder.block.0.layer.2", "hook": "forward", "action": "capture", "tokens": "all"},
        "last": {
            "select": "decoder.block.0", "hook": "forward", "target": "[0]", "action": "capture",
            "tokens": -1,
        },
    }  # fmt: skip
    with hookrun.hooked(model.eval(), hooks) as hooked, torch.no_grad():
        model(ids, labels=labels)
        found = hooked.captures["c"]["decoder.block.0.layer.2"]
        assert found.positions.tolist() == [0, 1, 2, 3, 0, 1]
        assert found.token_ids.tolist() == [299, 120, 121, 122, 299, 130]
        last = hooked.captures["last"]["decoder.block.0"]
        assert last.positions.tolist() == [3, 1]
        model(
            ids, decoder_input_ids=labels.clamp_min(0)
        )  # says its tokens itself: none of them is known as padding
        assert found.positions.tolist()[6:] == [0, 1, 2, 3] * 2


def value(run: Run, name: str = "loss") -> float:
    return float([line for line in run.metrics if name in line][-1][name])
