"""Encoder-decoders on prompts whose answers are their labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hookrun
from hookrun.store.reader import Run

pytest.importorskip("transformers")

T5 = (
    "{model_type: t5, num_layers: 1, num_decoder_layers: 1, d_model: 16, d_kv: 4, num_heads: 4, d_ff: 32, "
    "vocab_size: 300, decoder_start_token_id: 299, pad_token_id: 0, eos_token_id: 1}"
)
PROMPTS = [
    {"prompt": "a b", "answer": "xyz", "spans": {"s": "a"}},
    {"prompt": "a bcd", "answer": "z", "spans": {"s": "bc"}},
]


@pytest.fixture
def seq2seq(tmp_path: Path) -> tuple[str, ...]:
    """Overrides for a T5 of random weights on two prompts with answers of different lengths."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
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
        assert found.sample_ids.tolist() == [0, 0, 0, 1] and found.positions.tolist() == [0, 1, 2, 0]
        if side == "right":  # the token that begins an answer is none of the tokenizer's
            assert found.token_ids.tolist() == [299, *b"xy", 299] and list(found.text) == ["", "x", "y", ""]
        rows[side] = found[:]
    torch.testing.assert_close(rows["left"], rows["right"], atol=1e-6, rtol=1e-5)


def test_spans_select_the_encoders_tokens(executed, refused, seq2seq) -> None:
    modules = "[encoder.block.0.layer.1, decoder.block.0.layer.1.EncDecAttention.k]"
    captures = executed(*seq2seq, capture(modules, "{span: s}")).captures["c"]
    assert len(captures) == 2
    for found in captures.values():
        assert found.sample_ids.tolist() == [0, 1, 1] and found.positions.tolist() == [0, 2, 3]
        assert found.token_ids.tolist() == list(b"abc")
    said = refused(*seq2seq, capture("decoder.block.0.layer.2", "{position: 0, exclude: {span: s}}"))
    assert "hooks.c" in said and "spans refer to the encoder's tokens" in said


def test_labels_tell_the_padding_of_the_decoder_outside_of_tasks_too() -> None:
    overrides = ["model=transformers", f"model.args.config={T5}", "model.args.class=seq2seq_lm", "data=names"]
    model, _ = hookrun.build(overrides=[*overrides, "compute.device=cpu"])
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    labels = torch.tensor([[120, 121, 122, 1], [130, 1, -100, -100]])
    hooks = {
        "c": {"select": "decoder.block.0.layer.2", "hook": "forward", "action": "capture", "tokens": "all"},
        "last": {
            "select": "decoder.block.0",
            "hook": "forward",
            "target": "[0]",
            "action": "capture",
            "tokens": -1,
        },
    }
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
