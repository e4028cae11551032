"""model=transformers: random and saved models, and the points of their attention. No network."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.errors import HookrunWarning, SpecError
from hookrun.models import attention_points, build, origin
from hookrun.spec.experiment import Model

pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma": {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
    "gemma2": {**GROUPED, "head_dim": 8},  # which bounds its scores
    "bert": SIZES,
    "t5": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": None},
        "decoder_start_token_id": 0,
    },
}
KINDS = {"bert": "masked_lm", "t5": "seq2seq_lm"}
T5 = "t5"


def made(attention: str = "eager", vocab_size: int | None = 40, **args: Any) -> nn.Module:
    return build(
        Model(name="transformers", args={"attention": attention, **args}),
        sample_shape=None,
        num_classes=3,
        trust=frozenset(),
        vocab_size=vocab_size,
        length=10,
    ).eval()


def random_model(name: str, attention: str, **args: Any) -> nn.Module:
    torch.manual_seed(0)
    config = {**ARCHITECTURES[name], "model_type": name}
    model = made(attention, config=config, **{"class": KINDS.get(name, "causal_lm")}, **args)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # large enough that a mistake shows
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data.add_(noise.to(parameter.dtype))
    return model


def batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    mask = torch.ones(3, 10, dtype=torch.int64)
    mask[1, 6:], mask[2, :3] = 0, 0
    inputs = {"input_ids": torch.randint(40, (3, 10), generator=generator), "attention_mask": mask}
    return inputs | ({"labels": torch.randint(40, (3, 5), generator=generator)} if name == T5 else {})


def problem(**args: Any) -> str:
    with pytest.raises(SpecError) as error:
        made(**args)
    return str(error.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_points_equal_eager_attention_exactly_and_hooks_on_them_act(name: str) -> None:
    eager, points = random_model(name, "eager"), random_model(name, "points")
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
    if name == T5:  # self and cross attention of each layer of the decoder in turns
        assert len(patterns) == 6
        patterns = [*patterns[:2], *patterns[2::2]]
    assert all(torch.equal(a, b) for a, b in zip(patterns, theirs, strict=True))
    rows = torch.stack([each.sum(-1).mean() for each in patterns])
    torch.testing.assert_close(rows, torch.ones(len(patterns)))
    off = {"off": {"select": "**.z", "hook": "forward", "action": "scale", "factor": 0, "index": ":, :, 1"}}
    with hookrun.compile(off, points, example=((), inputs)).install(points), torch.no_grad():
        edited = points(**inputs).logits
    zeroed = _without_head_1(eager, name)
    with torch.no_grad():
        torch.testing.assert_close(edited, zeroed(**inputs).logits, atol=1e-5, rtol=1e-5)
    assert not torch.equal(edited, expected.logits)


def _without_head_1(model: nn.Module, name: str) -> nn.Module:
    """The model whose output projections take nothing of head 1, which is of width 8."""
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


def test_values_at_the_points_are_by_position_and_head() -> None:
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
def test_results_of_the_heads_sum_to_the_output_projection_and_can_be_edited(name: str) -> None:
    eager, model = random_model(name, "eager"), random_model(name, "points", result=True)
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


def test_results_are_refused_where_there_are_none() -> None:
    config = {**SIZES, "model_type": "bert"}
    said = problem(attention="points", result=True, config=config, **{"class": "masked_lm"})
    assert "has no output projection of its own" in said
    assert "`result: true` goes with `attention: points`" in problem(result=True, config=GPT2)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_points_equal_eager_attention_in_bfloat16_too(name: str) -> None:
    """One of them computes its softmax in float32, the other does not."""
    inputs = batch(name)
    found = [random_model(name, each, dtype="bfloat16")(**inputs).logits for each in ("eager", "points")]
    assert found[0].dtype is torch.bfloat16 and torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt_oss", "the attention of GptOssAttention is computed in another way than ours"),
        ("mamba", "has no module whose attention"),
        ("gptj", "does not let another function compute its attention"),
    ],
)
def test_points_are_refused_where_they_would_not_be_the_models_own(name: str, said: str) -> None:
    sizes = {
        "gpt_oss": {**GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "mamba": {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": None},
        "gptj": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "vocab_size": None},
    }
    message = problem(attention="points", config={"model_type": name, **sizes[name]})
    assert said in message and "model.args.attention" in message


def test_targets_reach_the_logits_of_an_output() -> None:
    model, inputs = random_model("gpt2", "sdpa"), batch("gpt2")
    hooks = {"out": {"select": "", "hook": "forward", "action": "scale", "factor": 2, "target": "logits"}}
    with torch.no_grad():
        plain = model(**inputs)
        assert set(plain) == {"logits"}  # no cache
        with hookrun.compile(hooks, model, example=((), inputs)).install(model):
            assert torch.equal(model(**inputs).logits, plain.logits * 2)


def test_a_saved_model_is_loaded_from_safetensors_alone(tmp_path: Path) -> None:
    model = random_model("gpt2", "eager")
    model.save_pretrained(tmp_path / "safe")
    inputs = batch("gpt2")
    for attention in ("eager", "points"):
        again = made(attention, path=str(tmp_path / "safe"))
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    assert origin(Model(name="transformers", args={"path": str(tmp_path / "safe")})) == str(tmp_path / "safe")
    with pytest.warns(HookrunWarning, match="lacks 1 of the model's .*score.weight; they are random"):
        made(path=str(tmp_path / "safe"), **{"class": "sequence_classification"})
    assert "'seq2seq_lm' is not among" in problem(path=str(tmp_path / "safe"), **{"class": "seq2seq_lm"})
    model.config.save_pretrained(tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    assert "no model that transformers can load from safetensors" in problem(path=str(tmp_path / "pickled"))
    assert "there is no folder" in problem(path=str(tmp_path / "nothing"))
    code = tmp_path / "code"
    code.mkdir()
    (code / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}}'
    )
    (code / "m.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "model.args.path" in problem(path=str(code))
    assert not (tmp_path / "ran").exists()


def test_without_a_network_the_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = problem(path="nobody/nothing-at-all")
    assert "could not be fetched from the hub" in message and "hf download nobody/nothing-at-all" in message


def test_a_configuration_is_checked_key_by_key() -> None:
    for change, said in [
        ({"n_layr": 3}, "did you mean 'n_layer'"),
        ({"model_type": "gpt3"}, "not an architecture of transformers"),
        ({"n_head": 5}, "must be divisible"),
        ({"n_embd": "wide"}, "n_embd"),
        ({"n_layer": 10**6}, "expected at most 1024"),
        ({"n_embd": 2**20}, "GiB of memory are free"),
        ({"attn_implementation": "kernels-community/x"}, "may not choose what code"),
        ({"auto_map": {"AutoModel": "x"}}, "may not choose what code"),
    ]:
        message = problem(config={**GPT2, **change})
        assert said in message and "model.args.config" in message, message
    nested = problem(config={"model_type": "llava", "text_config": {"num_hidden_layers": 10**8}})
    assert "model.args.config.text_config.num_hidden_layers" in nested
    assert "give either `path`, or `config`" in problem()
    assert "expected 'eager', 'sdpa' or 'points'" in problem(attention="point", config=GPT2)
    assert made(config=GPT2).config.vocab_size == 40
    assert made(config=GPT2, **{"class": "sequence_classification"}).config.num_labels == 3


def test_the_seed_decides_the_weights() -> None:
    first, second = (random_model("gpt2", "eager").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_our_attention_names_what_it_knows_of_theirs() -> None:
    assert set(inspect.signature(attention_points.attention).parameters) <= attention_points._KNOWN
