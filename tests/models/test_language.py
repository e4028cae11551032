"""model=transformers: random and saved models. No network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from language_models import GPT2, batch, made, problem, random_model
from safetensors.torch import load_file, save_file

import hookrun
from hookrun.errors import HookrunWarning
from hookrun.models import origin
from hookrun.models.settings import Model

pytest.importorskip("transformers")


def test_a_target_names_the_logits_of_an_output() -> None:
    model = random_model("gpt2", "sdpa")
    inputs = batch("gpt2")
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
    assert "has no 'seq2seq_lm' model of the type" in problem(
        path=str(tmp_path / "safe"), **{"class": "seq2seq_lm"}
    )
    model.config.save_pretrained(tmp_path / "pickled")
    made_of = "no model that transformers can load from tensors alone"
    assert made_of in problem(path=str(tmp_path / "pickled"))
    assert "there is no folder" in problem(path=str(tmp_path / "nothing"))
    code = tmp_path / "code"
    code.mkdir()
    (code / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}}'
    )
    (code / "m.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "model.args.path" in problem(path=str(code))
    assert not (tmp_path / "ran").exists()


def changed(folder: Path, path: Path, dtype: torch.dtype, name: str, **config: object) -> str:
    """The folder, copied, with one tensor of another dtype and a changed configuration."""
    shutil.copytree(folder, path)
    for file in path.glob("*.safetensors"):
        state = load_file(file)
        state |= {key: value.to(dtype) for key, value in state.items() if name in key}
        save_file(state, file, {"format": "pt"})
    settings = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(settings))
    return str(path)


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_a_saved_model_of_another_kind_of_number_is_refused(tmp_path: Path, shards: str) -> None:
    folder = tmp_path / "model"
    name = "h.0.mlp.c_fc.weight"
    random_model("gpt2", "eager").save_pretrained(folder, max_shard_size=shards)
    assert (folder / "model.safetensors").exists() == (shards == "5GB")
    for dtype in (torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        path = changed(folder, tmp_path / str(dtype), dtype, name)
        assert f"{name}' is " in problem(path=path)
    unknown = changed(
        folder, tmp_path / "unknown", torch.int8, name, quantization_config={"quant_method": "x"}
    )
    assert f"{name}' is torch.int8 in the file" in problem(path=unknown)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        made(path=changed(folder, tmp_path / str(dtype), dtype, name))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layer": 100_000}, "model.args.path.n_layer: found 100000, expected at most 1024"),
        ({"inner": {"num_experts": 10**6}}, "model.args.path.inner.num_experts: found 1000000"),
        ({"layer_types": ["x"] * 2000}, "model.args.path.layer_types: found 2000 values"),
        ({"num_labels": 2 * 10**9}, "model.args.path.num_labels"),
        ({"vocab_size": 10**15}, "model.args.path.vocab_size"),
        ({"n_inner": 2**31}, "GiB of memory are free"),
    ],
)
def test_sizes_in_a_folder_have_the_limits_of_a_configuration(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    random_model("gpt2", "eager").save_pretrained(tmp_path / "model")
    assert said in problem(path=changed(tmp_path / "model", tmp_path / "large", torch.float32, "", **change))


def test_without_a_network_the_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = problem(path="nobody/nothing-at-all")
    assert "could not be fetched from the hub" in message
    assert "hf download nobody/nothing-at-all" in message


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
        assert said in message, message
        assert "model.args.config" in message, message
    nested = problem(config={"model_type": "llava", "text_config": {"num_hidden_layers": 10**8}})
    assert "model.args.config.text_config.num_hidden_layers" in nested
    assert "give either `path`, or `config`" in problem()
    assert "expected 'eager', 'sdpa' or 'points'" in problem(attention="point", config=GPT2)
    for attention in ("sdpa", "points"):
        message = problem(attention=attention, config={**GPT2, "n_head": 5})
        assert "model.args.config: " in message
        assert "must be divisible" in message
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": None}
    message = problem(attention="sdpa", config=bloom)
    assert "model.args.attention: sdpa: " in message
    assert "use model.args.attention=eager" in message
    assert made(config=GPT2).config.vocab_size == 40
    assert made(config=GPT2, **{"class": "sequence_classification"}).config.num_labels == 3


def test_the_seed_decides_the_weights() -> None:
    first = random_model("gpt2", "eager").state_dict()
    second = random_model("gpt2", "eager").state_dict()
    for name in first:
        assert torch.equal(first[name], second[name])
