"""Where the last dimension of a value holds heads, in models of transformers and in the catalogue's decoder."""

from __future__ import annotations

import pytest
from language_models import random_model
from torch import nn

from hookrun.engine.plan.heads import last_dimension_holds_heads
from hookrun.models.decoder import Decoder


def holding(model: nn.Module, *, of_input: bool) -> set[str]:
    """The paths, without those of later layers."""
    return {
        path
        for path, _ in model.named_modules()
        if ".1." not in path and last_dimension_holds_heads(model, path, of_input=of_input)
    }


@pytest.mark.parametrize(
    ("name", "attention", "outputs", "projection"),
    [
        ("llama", "model.layers.0.self_attn.", ["q_proj", "k_proj", "v_proj"], "o_proj"),
        ("gpt2", "transformer.h.0.attn.", [], "c_proj"),
        (
            "bert",
            "bert.encoder.layer.0.attention.",
            ["self", "self.query", "self.key", "self.value"],
            "output.dense",
        ),
    ],
)
def test_heads_are_in_inputs_of_the_output_projection(
    name: str, attention: str, outputs: list[str], projection: str
) -> None:
    pytest.importorskip("transformers")
    model = random_model(name, "eager")
    assert holding(model, of_input=False) == {attention + output for output in outputs}
    assert holding(model, of_input=True) == {attention + projection}


def test_heads_of_the_decoder_are_in_its_points() -> None:
    decoder = holding(Decoder(vocab_size=8, length=4, layers=1), of_input=False)
    assert decoder == {f"blocks.0.attn.{name}" for name in ("q", "k", "v", "scores", "pattern", "z")}
