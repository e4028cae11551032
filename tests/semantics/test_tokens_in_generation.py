"""`tokens` in generation by transformers: the same for a prompt alone and in a padded batch, with and without cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hookrun

PROMPTS = [torch.tensor([11, 12, 13, 14, 15]), torch.tensor([7, 8, 30]), torch.tensor([9, 5, 4, 20])]
NEW, WIDTH = 5, 32
_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STEER = [0.4 * (number % 5) for number in range(WIDTH)]


def random_weights(model: nn.Module, scale: float = 4) -> nn.Module:
    """Give the model random weights, large enough that the generated tokens differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model.eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 50}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return random_weights(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)))


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_SIZES, num_key_value_heads=2, max_position_embeddings=64)
    return random_weights(transformers.LlamaForCausalLM(config))


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return random_weights(
        transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **ends)), scale=3
    )


def hook(select: str, action: str, tokens: Any, hook: str = "forward", **keys: Any) -> dict[str, Any]:
    return {"select": select, "hook": hook, "action": action, "tokens": tokens, **keys}


GENERATED = {"phase": "generation", "position": {"start": 1}, "exclude": 3}
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "gpt2": (
        gpt2,
        "transformer.h.1",
        {
            "steer": hook("transformer.h.0", "add_bias", GENERATED, value=STEER),
            "last": hook("transformer.h.0.mlp", "scale", -1, factor=0.5),
            "head": hook("transformer.h.1.attn.c_proj", "scale", "all", "forward_pre", factor=0, heads=[1]),
        },
    ),
    "llama": (
        llama,
        "model.layers.1",
        {
            "steer": hook("model.layers.0", "add_bias", GENERATED, value=STEER),
            "keys": hook("model.layers.1.self_attn.k_proj", "scale", [1, -1], factor=0, heads=1),
        },
    ),
    "t5": (
        t5,
        "decoder.block.1.layer.2",
        {
            "source": hook("encoder.block.0.layer.1", "add_bias", -1, value=STEER),
            "steer": hook("decoder.block.0.layer.2.DenseReluDense.wo", "add_bias", GENERATED, value=STEER),
            "keys": hook("decoder.block.1.layer.1.EncDecAttention.k", "scale", 0, factor=0),
        },
    ),
}


def left_padded(prompts: list[Tensor]) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat([prompt.new_zeros(width - len(prompt)), prompt]) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def generated(model: Any, plan: Any, prompts: list[Tensor], **how: Any) -> tuple[list[list[int]], Any]:
    """Generate; returns the new tokens of each prompt up to its end, and the captured rows."""
    batch = left_padded(prompts)
    with plan.install(model) as hooks, torch.no_grad():
        out = model.generate(**batch, max_new_tokens=NEW, do_sample=False, **how)
    rows = next(iter(hooks.captures["seen"].values()))
    start = 1 if model.config.is_encoder_decoder else batch["input_ids"].shape[1]
    new = [each[start:].tolist() for each in out]
    return [each[: each.index(2) if 2 in each else None] for each in new], rows


@pytest.mark.parametrize("name", MODELS)
def test_batches_caches_and_beams_do_not_change_the_captures_of_a_prompt(name: str) -> None:
    make, layer, edits = MODELS[name]
    model = make()
    seen = {"seen": hook(layer, "capture", "all")}
    plan, unhooked = hookrun.compile({**edits, **seen}, model), hookrun.compile(seen, model)
    alone = [generated(model, plan, [prompt]) for prompt in PROMPTS]
    assert [new for [new], _ in alone] != [generated(model, unhooked, [prompt])[0][0] for prompt in PROMPTS]
    for how in ({}, {"use_cache": False}, {"num_beams": 2}):
        news, rows = generated(model, plan, PROMPTS, **how)
        values = torch.cat(list(rows))
        for number, prompt in enumerate(PROMPTS):
            [new], one = generated(model, plan, [prompt], **how) if "num_beams" in how else alone[number]
            assert news[number] == new
            mine = rows.sample_ids == number
            if "num_beams" in how:  # beams go on until all prompts have ended
                mine &= rows.positions < len(prompt)
                kept = one.positions < len(prompt)
            else:
                kept = torch.ones_like(one.positions, dtype=torch.bool)
                assert len(one.positions) == len(set(one.positions.tolist()))
            assert rows.positions[mine].tolist() == one.positions[kept].tolist()
            torch.testing.assert_close(values[mine], torch.cat(list(one))[kept], rtol=1e-3, atol=1e-3)


def test_an_edit_in_generation_equals_a_hook_by_hand() -> None:
    model: Any = gpt2()
    block, steer, seen = model.transformer.h[0], torch.tensor(STEER), 0

    def by_hand(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 1:
            return None
        if isinstance(output, Tensor):
            return output + steer
        return (output[0] + steer, *output[1:])

    batch = left_padded(PROMPTS)
    handle = block.register_forward_hook(by_hand)
    expected = model.generate(**batch, max_new_tokens=NEW, do_sample=False)
    handle.remove()
    spec = {"steer": hook("transformer.h.0", "add_bias", {"phase": "generation"}, value=STEER)}
    for use_cache in (True, False):
        with hookrun.hooked(model, spec):
            found = model.generate(**batch, max_new_tokens=NEW, do_sample=False, use_cache=use_cache)
        assert torch.equal(found, expected)
    assert not torch.equal(model.generate(**batch, max_new_tokens=NEW, do_sample=False), expected)


def test_a_run_that_generates_has_the_rows_of_its_prompts(tmp_path: Path) -> None:
    model: Any = gpt2()
    first = {"position": [0, 4, 7], "missing": "skip"}
    spec = {"seen": hook("transformer.h.1", "capture", first)}
    with hookrun.record(model, spec, tmp_path / "run"):
        for prompts in (PROMPTS[:2], PROMPTS[2:]):
            model.generate(**left_padded(prompts), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    rows = hookrun.open_run(tmp_path / "run").captures["seen"]["transformer.h.1"]
    assert rows.sample_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert rows.positions.tolist() == [0, 4, 7, 0, 4, 0, 4, 7]


def test_tokens_after_the_end_of_a_sequence_are_padding() -> None:
    model: Any = gpt2()
    seen = {"seen": hook("transformer.h.1", "capture", "all")}
    seen["last"] = hook("transformer.h.0", "scale", {"phase": "generation", "position": "1:"}, factor=2)
    plan = hookrun.compile(seen, model)
    plain = [generated(model, plan, [prompt], eos_token_id=99)[0][0] for prompt in PROMPTS]
    ends = [plain[0][1], plain[1][3]]  # the first prompt ends after its second token
    alone = [generated(model, plan, [prompt], eos_token_id=ends)[1] for prompt in PROMPTS]
    assert len({len(each.positions) - len(p) for each, p in zip(alone, PROMPTS, strict=True)}) > 1
    for use_cache in (True, False):
        _, rows = generated(model, plan, PROMPTS, eos_token_id=ends, use_cache=use_cache)
        values = torch.cat(list(rows))
        for number, one in enumerate(alone):
            mine = rows.sample_ids == number
            assert rows.positions[mine].tolist() == one.positions.tolist()
            torch.testing.assert_close(values[mine], torch.cat(list(one)), rtol=1e-3, atol=1e-3)


class Counting(nn.Module):
    """A model for a user's own generation loop, without a cache and without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)  # type: ignore[no-any-return]


def test_a_users_own_loop_calls_hooks_tokens_once_per_prompt() -> None:
    model, batch = Counting(), left_padded(PROMPTS)
    spec = {
        "prompt": hook("embed", "capture", -1),
        "new": hook("embed", "capture", {"phase": "generation", "position": [0, 1], "missing": "skip"}),
        "all": hook("embed", "capture", "all"),
    }
    with hookrun.hooked(model, spec) as hooks:
        for _ in range(2):  # the second time the same prompts begin new sequences
            ids = batch["input_ids"]
            hooks.tokens(ids, batch["attention_mask"])
            for step in range(3):
                model(ids)
                ids = torch.cat([ids, torch.full((3, 1), 40 + step)], dim=1)
    found = {name: modules["embed"] for name, modules in hooks.captures.items()}
    assert found["prompt"].token_ids.tolist() == [15, 30, 20] * 2
    assert found["new"].token_ids.tolist() == [*[40] * 3, *[41] * 3] * 2
    assert found["new"].positions.tolist() == [5, 3, 4, 6, 4, 5] * 2
    assert len(found["all"].positions) == 2 * (12 + 3 + 3)
    assert found["all"].sample_ids.unique().tolist() == [0, 1, 2, 3, 4, 5]
    with hookrun.hooked(model, {"all": spec["all"]}) as hooks:  # without hooks.tokens each call is a prompt
        for width in (4, 5):
            model(batch["input_ids"][:, :width])
    assert [len(each) for each in hooks.captures["all"]["embed"]] == [12, 15]
