"""`attention: points`: each value of a transformers model's attention is the output of a module."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from language_models import ARCHITECTURES, GPT2, GROUPED, SIZES, T5, batch, problem, random_model
from torch import nn

import hookrun
from hookrun.engine.plan import attention_points

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_points_equal_eager_attention_exactly(name: str) -> None:
    eager = random_model(name, "eager")
    points = random_model(name, "points")
    inputs = batch(name)
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True)
        assert torch.equal(points(**inputs).logits, expected.logits)
        copied = copy.deepcopy(points)
        assert torch.equal(copied(**inputs).logits, expected.logits)
    hooks = {
        name: {"select": f"**.{name}", "hook": "forward", "action": "capture"}
        for name in (("scores", "pattern", "z") if name == T5 else attention_points.POINTS)
    }
    with hookrun.compile(hooks, points, example=((), inputs)).install(points) as installed, torch.no_grad():
        points(**inputs)
    patterns = [each[0] for each in installed.captures["pattern"].values()]
    theirs = (
        [*expected.encoder_attentions, *expected.decoder_attentions] if name == T5 else expected.attentions
    )
    if name == T5:  # self-attention and cross-attention alternate in the decoder's layers
        assert len(patterns) == 6
        patterns = [*patterns[:2], *patterns[2::2]]
    for a, b in zip(patterns, theirs, strict=True):
        assert torch.equal(a, b)
    rows = torch.stack([each.sum(-1).mean() for each in patterns])
    torch.testing.assert_close(rows, torch.ones(len(patterns)))
    off = {"off": {"select": "**.z", "hook": "forward", "action": "scale", "factor": 0, "index": ":, :, 1"}}
    with hookrun.compile(off, points, example=((), inputs)).install(points), torch.no_grad():
        edited = points(**inputs).logits
    zeroed = _without_head_1(eager, name)
    with torch.no_grad():
        torch.testing.assert_close(edited, zeroed(**inputs).logits, atol=1e-5, rtol=1e-5)
    assert not torch.equal(edited, expected.logits)


def test_points_are_named_where_a_pattern_is_missing() -> None:
    model = random_model("llama", "sdpa")
    inputs = batch("llama")
    there = "model.args.attention=points"
    with pytest.raises(hookrun.CompileError, match=rf"{there}, or hookrun\.points\(model\), adds pattern"):
        hookrun.compile({"seen": {"select": "**.pattern", "hook": "forward", "action": "capture"}}, model)
    keys = {"select": "**.self_attn", "hook": "forward", "target": "[1]"}
    none = rf"fired and its target \[1\] is None \({there} gives patterns\) on model.layers.0.self_attn"
    for more in (
        {"action": "capture"},
        {"action": "capture", "tokens": {"query": -1}},
        {"action": "scale", "factor": 0},
    ):
        with (
            pytest.warns(hookrun.HookrunWarning, match=none),
            hookrun.hooked(model, {"seen": {**keys, **more}}),
        ):
            model(**inputs)


def _without_head_1(model: nn.Module, name: str) -> nn.Module:
    """The model with the rows of head 1, which has width 8, zeroed in its output projections."""
    model = copy.deepcopy(model)
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        projection = path.endswith(("attn.c_proj", "o_proj", "attention.output.dense")) or (
            name == T5 and last == "o"
        )
        if projection:
            weight = module.weight.data
            (weight if name == "gpt2" else weight.T)[8:16] = 0
    return model


def test_values_at_the_points_have_heads() -> None:
    model = random_model("llama", "points")
    assert set(attention_points.POINTS) <= set(dict(model.model.layers[0].self_attn.named_children()))
    hooks = {
        name: {"select": f"model.layers[0].self_attn.{name}", "hook": "forward", "action": "capture"}
        for name in attention_points.POINTS
    }
    with hookrun.hooked(model, hooks) as installed, torch.no_grad():
        model(**batch("llama"))
    shapes = {name: next(iter(each.values()))[0].shape for name, each in installed.captures.items()}
    assert shapes == {
        **{"q": (3, 10, 4, 8), "k": (3, 10, 2, 8), "v": (3, 10, 2, 8), "z": (3, 10, 4, 8)},
        **{"scores": (3, 4, 10, 10), "pattern": (3, 4, 10, 10)},
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_results_of_the_heads_sum_to_the_projection(name: str) -> None:
    eager = random_model(name, "eager")
    model = random_model(name, "points", result=True)
    inputs = batch(name)
    assert set(model.state_dict()) == set(eager.state_dict())
    off = {
        "seen": {"select": "**.result", "hook": "forward", "action": "capture"},
        "off": {"select": "**.result", "hook": "forward", "action": "scale", "factor": 0, "index": ":, :, 1"},
    }
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, eager(**inputs).logits, atol=1e-4, rtol=1e-4)
        model = copy.deepcopy(model)
        with hookrun.compile(off, model, example=((), inputs)).install(model) as installed:
            edited = model(**inputs).logits
        expected = _without_head_1(eager, name)(**inputs).logits
    torch.testing.assert_close(edited, expected, atol=1e-4, rtol=1e-4)
    assert next(iter(installed.captures["seen"].values()))[0].shape == (3, 10, 4, 32)


def test_results_need_an_output_projection() -> None:
    config = {**SIZES, "model_type": "bert"}
    said = problem(attention="points", result=True, config=config, **{"class": "masked_lm"})
    assert "has no output projection of its own" in said
    assert "`result: true` goes with `attention: points`" in problem(result=True, config=GPT2)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_points_equal_eager_attention_in_bfloat16_too(name: str) -> None:
    """One of the two models computes its softmax in float32, the other does not."""
    inputs = batch(name)
    found = [random_model(name, each, dtype="bfloat16")(**inputs).logits for each in ("eager", "points")]
    assert found[0].dtype is torch.bfloat16
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt_oss", "the attention of GptOssAttention is not computed as hookrun's is"),
        ("mamba", "has no attention module whose attention function transformers can replace"),
        ("gptj", "use eager or sdpa"),  # the reason depends on the version of transformers
    ],
)
def test_points_that_would_differ_are_refused(name: str, said: str) -> None:
    sizes = {
        "gpt_oss": {**GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "mamba": {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": None},
        "gptj": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "vocab_size": None},
    }
    message = problem(attention="points", config={"model_type": name, **sizes[name]})
    assert said in message
    assert "model.args.attention" in message


def test_known_arguments_include_hookrun_s_attention() -> None:
    assert set(inspect.signature(attention_points.attention).parameters) <= attention_points._KNOWN


@pytest.mark.parametrize("name", ["gpt2", "llama", T5])
def test_a_model_of_one_s_own_gets_the_points(name: str) -> None:
    eager = random_model(name, "eager")
    own = random_model(name, "sdpa")
    with pytest.raises(hookrun.CompileError, match=r"or hookrun\.points\(model\), adds pattern"):
        hookrun.compile({"h": {"select": "**.pattern", "hook": "forward", "action": "capture"}}, own)
    assert hookrun.points(hookrun.points(own)) is own
    hook = {"select": "**.pattern", "hook": "forward", "action": "scale", "factor": 0.0}
    with torch.no_grad(), hookrun.hooked(own, {"h": hook | {"enabled": False}}):
        assert torch.equal(own(**batch(name)).logits, eager(**batch(name)).logits)
    with torch.no_grad(), hookrun.hooked(own, {"h": hook}, strict=True):
        assert not torch.equal(own(**batch(name)).logits, eager(**batch(name)).logits)


def test_points_need_a_replaceable_attention() -> None:
    from transformers import AutoModel, XCLIPConfig

    with pytest.raises(hookrun.HookrunError, match="points: Linear has no attention module"):
        hookrun.points(nn.Linear(2, 2))
    small = {**SIZES, "image_size": 32, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1}
    of_mit = {"mit_hidden_size": 16, "mit_num_hidden_layers": 1, "mit_intermediate_size": 16}
    clip = AutoModel.from_config(XCLIPConfig(text_config=small, vision_config=small | of_mit))
    with pytest.raises(
        hookrun.HookrunError, match=r"does not replace the attention function of mit\.encoder"
    ):
        hookrun.points(clip)
