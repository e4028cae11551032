"""task=generate: each prompt continues as it does alone, with the hooks, and without them for comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hookrun
from hookrun.store.reader import Run

Runs = Callable[..., Run]

PROMPTS = ["Paris is in", "Rome", "The town of Lyon is in", "Pisa is in the country of"]
SHARED = "initializer_range: 0.5, vocab_size: null, bos_token_id: 0, eos_token_id: 0"
GPT2 = f"{{model_type: gpt2, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 64, {SHARED}}}"
T5 = (
    "{model_type: t5, num_layers: 1, d_model: 16, d_kv: 8, d_ff: 16, num_heads: 2, vocab_size: null, "
    "decoder_start_token_id: 0, eos_token_id: 1}"
)
MODELS: dict[str, tuple[str, ...]] = {
    "decoder": ("model=decoder", "model.args.width=16", "model.args.length=64"),
    "gpt2": ("model=transformers", f"model.args.config={GPT2}"),
    "t5": ("model=transformers", f"model.args.config={T5}", "model.args.class=seq2seq_lm"),
}
LAYER = {"decoder": "blocks.0", "gpt2": "transformer.h.0", "t5": "decoder.block.0.layer.2"}
DRAWN = "task.sampling={temperature: 1.5, top_k: 100, top_p: 0.99}"


@pytest.fixture
def generate(executed: Runs, tmp_path: Path) -> Runs:
    """Continues the four prompts by six tokens, with overrides."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": each}) for each in PROMPTS))
    data = ("data=prompts", "data.args.file=prompts.jsonl")

    def generate(name: str, *more: str, **options: Any) -> Run:
        return executed(*MODELS[name], *data, "task=generate", "task.max_new_tokens=6", *more, **options)

    return generate


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_continues_as_it_does_alone(name: str, generate: Runs) -> None:
    hooks = (
        hook("steer", LAYER[name], "scale", "{phase: generation, position: {start: 0, every: 2}}", factor=3),
        hook("last", LAYER[name], "scale", "-1", factor=-2),
        hook("seen", LAYER[name], "capture", "all"),
    )
    alone = generate(name, *hooks, DRAWN, "data.batch_size=1", "task.without_hooks=true")
    rows = rows_of(alone)
    cases = [("data.batch_size=4", "data.args.padding=left")]
    cases += [("data.batch_size=3", "data.args.length=30", "task.cache=false")] if name == "gpt2" else []
    for case in cases:
        found = generate(name, *hooks, DRAWN, *case)
        assert ids_of(found) == ids_of(alone)
        assert [line["prompt"] for line in found.generations] == PROMPTS
        others = rows_of(found)
        assert rows.keys() == others.keys()
        assert len(rows) >= len(PROMPTS) * 6
        for key, row in rows.items():
            torch.testing.assert_close(others[key], row, rtol=1e-4, atol=1e-4)
    assert [line["ids_without"] for line in alone.generations] != ids_of(alone)


def rows_of(run: Run) -> dict[tuple[int, int], Tensor]:
    """(sample, position) -> the captured value; each occurs once."""
    (rows,) = run.captures["seen"].values()
    keys = list(zip(rows.sample_ids.tolist(), rows.positions.tolist(), strict=True))
    assert len(keys) == len(set(keys))
    return dict(zip(keys, rows[:], strict=True))


@torch.no_grad()
def test_greedy_decoding_equals_that_of_transformers(generate: Runs) -> None:
    model, data = hookrun.build(overrides=[*MODELS["gpt2"], "data=prompts", "data.args.file=prompts.jsonl",
                                           "task=generate", "compute.device=cpu"])  # fmt: skip
    model.eval()
    model.generation_config.do_sample = True  # its generation_config is not used
    for line in generate("gpt2").generations:
        ids = torch.tensor([line["prompt_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert out[0, ids.shape[1] :].tolist() == line["ids"]
        probabilities = model(ids).logits[0, -1].double().softmax(-1)
        token, text, probability = line["next"][0]
        assert token == line["ids"][0]
        assert text == data.info.tokenizer.tokens([token])[0]
        assert probability == pytest.approx(float(probabilities[token]), rel=1e-4)
        assert [p for _, _, p in line["next"]] == sorted((p for _, _, p in line["next"]), reverse=True)


def test_compare_has_the_same_prompts_without_hooks(generate: Runs, capsys: Any) -> None:
    hooks = (
        hook("steer", LAYER["decoder"], "scale", "all", factor=-3),
        hook("noise", LAYER["decoder"], "noise", "all", std=0.5),
        hook("seen", LAYER["decoder"], "capture", "all"),
        hook("counted", "blocks.1", "stats", "-1"),
    )
    found = generate("decoder", *hooks, DRAWN, "data.batch_size=3", "task.without_hooks=true")
    with_hooks = generate("decoder", *hooks, DRAWN, "data.batch_size=3")
    without = generate("decoder", DRAWN)
    assert ids_of(found) == ids_of(with_hooks)
    assert [line["ids_without"] for line in found.generations] == ids_of(without)
    changed = [one != other for one, other in zip(ids_of(found), ids_of(without), strict=True)]
    last = found.metrics[-1]
    assert last["changed"] == sum(changed) / 4 > 0
    assert last["new_tokens"] == 24
    assert last["kl_first"] == pytest.approx(sum(line["kl_first"] for line in found.generations) / 4)
    assert min(line["kl_first"] for line in found.generations) > 0
    rows = found.captures["seen"]["blocks.0"]
    others = with_hooks.captures["seen"]["blocks.0"]
    assert len(rows) == len(others), "the pass without hooks captures nothing"
    assert len(found.stats) == 2, "nor does it record or count anything"
    assert "first new token: the samples that changed most" in capsys.readouterr().out
    nothing = generate(
        "decoder", hook("same", "blocks.0", "scale", "all", factor=1), "task.without_hooks=true"
    )
    assert nothing.metrics[-1]["changed"] == nothing.metrics[-1]["kl_first"] == 0
    assert "the hooks changed neither the first new token" in capsys.readouterr().out


def test_buffers_of_the_pass_without_hooks_do_not_stay(executed, own_model, generate) -> None:
    own = own_model("""
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(256, 16), nn.Linear(16, 256)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, input_ids, attention_mask=None):
            self.calls += 1
            return self.out(torch.sin(self.embed(input_ids) + self.calls))
    """)
    common = (*own, "data=prompts", "data.args.file=prompts.jsonl", "task=generate", "data.batch_size=2")
    steer = hook("steer", "embed", "scale", "all", factor=1.1)
    both, alone = (executed(*common, steer, f"task.without_hooks={each}") for each in ("true", "false"))
    assert ids_of(both) == ids_of(alone)


def test_the_old_name_of_without_hooks_still_works(ready) -> None:
    longer = ("model=decoder", "model.args.length=64", "data=names")
    prepared = ready("task=generate", *longer, "task.compare=true")
    assert prepared.task.without_hooks
    assert "\n".join(prepared.notes).count("task.compare is the old name of task.without_hooks") == 1


def test_an_end_token_ends_its_sequence_alone(generate: Runs) -> None:
    for name in ("decoder", "gpt2"):
        plain = ids_of(generate(name, "task.stop=[]"))
        end = plain[2][2]
        found = generate(
            name, f"task.stop=[{end}]", hook("seen", LAYER[name], "capture", "{phase: generation}")
        )
        positions = found.captures["seen"][LAYER[name]].sample_ids.tolist()
        for number, (line, before) in enumerate(zip(found.generations, plain, strict=True)):
            cut = before.index(end) + 1 if end in before else len(before)
            assert line["ids"] == before[:cut]
            assert line["reason"] == ("end" if end in before else "length")
            assert positions.count(number) == cut - 1, "the last token goes through no layer"
        assert {line["reason"] for line in found.generations} == {"end", "length"}


def test_the_same_seed_gives_the_same_draws(generate: Runs) -> None:
    weights = "model.weights=" + str(saved_weights())
    first, again, other = (ids_of(generate("decoder", DRAWN, weights, f"seed={seed}")) for seed in (1, 1, 2))
    assert first == again != other


def saved_weights() -> Path:
    from safetensors.torch import save_file

    model, _ = hookrun.build(overrides=[*MODELS["decoder"], "data=names", "model.args.vocab_size=256"])
    save_file(model.state_dict(), "weights.safetensors")
    return Path("weights.safetensors").absolute()


def test_a_model_without_a_mask_takes_equal_lengths(executed, own_model, generate) -> None:
    own = own_model("""
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(256, 16), nn.Linear(16, 256)

        def forward(self, input_ids, attention_mask=None):
            assert attention_mask is None or bool(attention_mask.all()), "padding"
            places = torch.arange(1, input_ids.shape[1] + 1)[:, None]
            return {"logits": self.out(self.embed(input_ids).cumsum(1) * places)}
    """)
    common = (*own, "data=prompts", "data.args.file=prompts.jsonl", "task=generate", "task.max_new_tokens=4")
    seen = hook("seen", "embed", "capture", "all")
    found, alone = (executed(*common, seen, f"data.batch_size={size}") for size in (4, 1))
    assert ids_of(found) == ids_of(alone)
    assert len({tuple(ids) for ids in ids_of(found)}) > 1
    assert [line["sample"] for line in found.generations] == [0, 1, 2, 3]
    ids = found.captures["seen"]["embed"].sample_ids
    assert [int((ids == number).sum()) for number in range(4)] == [len(each) + 3 for each in PROMPTS]


def test_a_check_that_stops_ends_after_its_batch(generate: Runs) -> None:
    check = hook("check", "blocks.0", "check", "all", max=-1e9, policy="stop")
    assert len(generate("decoder", check, "data.batch_size=2", stops=True).generations) == 2


def test_prompts_that_cannot_go_on_are_refused(refused, tmp_path) -> None:
    names = ("data=names", "task=generate")
    said = refused("task=generate")
    assert "the data 'digits' has none" in said
    assert "use data=prompts" in said
    long = refused("model=decoder", *names)
    assert "32 new tokens after prompts of up to 15 need 46 positions, and the model has 15" in long
    assert "such as model.args.length=46" in long
    cold = refused(*MODELS["decoder"], *names, "task.sampling={temperature: 0}")
    assert "greater than or equal to 0.001" in cold
    wrong = refused(*MODELS["decoder"], *names, "compute.compile=true", "task.stop=[9999]")
    assert "compute.compile" in wrong
    assert "does not have 9999" in wrong
    fill = "+hooks.zero={select: unembed, hook: apply, action: fill, value: 0}"
    assert "changes the model itself" in refused(*MODELS["decoder"], *names, fill, "task.without_hooks=true")
    bert = "{model_type: bert, num_hidden_layers: 1, hidden_size: 16, num_attention_heads: 2, intermediate_size: 16}"
    masked = ("model=transformers", f"model.args.config={bert}", "model.args.class=masked_lm")
    assert "does not predict next tokens" in refused(*masked, *names)


def hook(name: str, layer: str, action: str, tokens: str, **keys: Any) -> str:
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    return f"+hooks.{name}={{select: {layer}, hook: forward, action: {action}, tokens: {tokens}{more}}}"


def ids_of(run: Run) -> list[list[int]]:
    return [line["ids"] for line in run.generations]
