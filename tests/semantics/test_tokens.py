"""`tokens` and `heads`, compared with hand-written code: in one forward and backward pass, and in generation."""

from __future__ import annotations

import gc
import itertools
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hooking import one_hook
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.engine.runtime import Installation
from hookrun.errors import CompileError, HookError, HookrunError

HEADS = 4
WIDTH = 3


PROMPTS = [torch.tensor([3, 4, 5, 6]), torch.tensor([7, 8]), torch.tensor([9, 5, 11])]


def padded(side: str) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(3, 5, dtype=torch.int64)
    mask = torch.zeros(3, 5, dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        start = 0 if side == "right" else 5 - len(prompt)
        ids[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = 1
    return ids, mask


BATCHES = {side: padded(side) for side in ("right", "left")}


def hook(select: str, action: str, tokens: Any, hook: str = "forward", **keys: Any) -> dict[str, Any]:
    return {"select": select, "hook": hook, "action": action, "tokens": tokens, **keys}


WANTED: Mapping[str, tuple[Any, Callable[[Tensor], list[int]]]] = {
    "the last": (-1, lambda prompt: [len(prompt) - 1]),
    "some": ([0, -1], lambda prompt: sorted({0, len(prompt) - 1})),
    "all": ("all", lambda prompt: list(range(len(prompt)))),
    "a range": ({"position": "1:3", "missing": "skip"}, lambda prompt: list(range(len(prompt)))[1:3]),
    "from the end": ("-2:", lambda prompt: [len(prompt) - 2, len(prompt) - 1]),
    "every other": ("::2", lambda prompt: list(range(0, len(prompt), 2))),
    "ids": ({"id": [5, 8]}, lambda prompt: [n for n, each in enumerate(prompt.tolist()) if each in (5, 8)]),
    "not the first": ({"exclude": 0}, lambda prompt: list(range(1, len(prompt)))),
    "of the prompt": ({"phase": "prompt", "position": 1}, lambda prompt: [1]),
}


def test_a_capture_has_a_row_for_each_position() -> None:
    model = Encoder()
    for (ids, mask), (tokens, wanted) in ((b, w) for b in BATCHES.values() for w in WANTED.values()):
        with under(model, example=False, seen=capture("first", tokens=tokens)) as hooks:
            model(input_ids=ids, attention_mask=mask)
            rows = hooks.captures["seen"]["first"]
        with torch.no_grad():
            whole = model.first(model.embed(ids), mask)
        expected = [(row, each) for row, prompt in enumerate(PROMPTS) for each in wanted(prompt)]
        assert list(zip(rows.sample_ids.tolist(), rows.positions.tolist(), strict=True)) == expected
        assert rows.token_ids.tolist() == [int(PROMPTS[row][each]) for row, each in expected]
        assert torch.equal(rows[0], torch.stack([whole[row, columns(mask, row)[n]] for row, n in expected]))
        again = pickle.loads(pickle.dumps(rows))
        assert torch.equal(again.positions, rows.positions)
        assert again.text == [""] * len(expected)


def test_rows_of_all_positions_outlive_a_later_write() -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH), nn.ReLU(inplace=True))
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad(), hookrun.hooked(model, {"seen": hook("0", "capture", "all")}) as hooks:
        hooks.tokens(ids)
        output = model(ids)
        (rows,) = hooks.captures["seen"]["0"]
    assert torch.equal(rows, model[0].weight[:8])
    assert not torch.equal(rows.view(output.shape), output)


def test_an_edit_changes_the_chosen_positions_alone() -> None:
    model = Encoder()
    edit = {"select": "first", "hook": "forward", "action": "scale", "factor": 3, "tokens": [0, -1]}
    for ids, mask in BATCHES.values():
        with under(model, example=False, edit=edit, seen=capture("first")) as hooks, torch.no_grad():
            output = model(ids, mask)
            edited = hooks.captures["seen"]["first"][0]
        with torch.no_grad():
            plain = model.first(model.embed(ids), mask)
        changed = torch.zeros_like(mask, dtype=torch.bool)
        for row in range(3):
            changed[row, columns(mask, row)[[0, -1]]] = True
        assert torch.equal(edited[~changed], plain[~changed])
        assert torch.equal(edited[changed], plain[changed] * 3)
        for row, prompt in enumerate(PROMPTS):
            with under(model, example=False, edit=edit), torch.no_grad():
                alone = model(input_ids=prompt[None])[0]
            torch.testing.assert_close(output[row, columns(mask, row)], alone, rtol=1e-5, atol=1e-5)


def test_gradients_are_seen_at_positions_of_their_call() -> None:
    for model in (Encoder(), Encoder(checkpointed=True)):
        zero = hook("second", "scale", -1, "output_grad", factor=0)
        hooks = {
            "in": capture("second.out", hook="backward", target="grad_input[0]", tokens=[0, -1]),
            "out": hook("second", "stats", 0, "output_grad", of=["numel"]),
        }
        with under(model, example=False, zero=zero, **hooks) as installed:
            outputs = [model(*batch) for batch in BATCHES.values()]  # both calls, then both backward passes
            torch.stack([output.sum() for output in outputs]).sum().backward()
        rows = installed.captures["in"]["second.out"]
        masks = {0: BATCHES["left"][1], 1: BATCHES["right"][1]}  # the last call first
        weight = model.second.out.weight
        for number, entry in enumerate(rows):
            # at the last position the gradient of the output is zero, elsewhere one
            ones = torch.ones(12) @ weight
            expected = torch.stack([ones * (each == 0) for row in range(3) for each in (0, 1)])
            torch.testing.assert_close(entry, expected)
            assert masks[number].shape[0] == 3
        assert [record["numel"] for record in installed.records] == [36, 36]


def test_heads_are_found_in_either_form_of_dimension() -> None:
    model, (ids, mask) = Encoder(), BATCHES["left"]
    with (
        under(
            model,
            z=capture("first.out", hook="forward_pre", target="[0]", heads=[1, 3], tokens=-1),
            part=capture("first.out", hook="forward_pre", target="[0]", heads=2, index="..., 1:", tokens=0),
            pattern=capture("first.pattern", heads=[-1]),
            whole=capture("first.out", hook="forward_pre", target="[0]"),
            probabilities=capture("first.pattern"),
        ) as hooks,
        torch.no_grad(),
    ):
        model(ids, mask)
    seen = {name: next(iter(modules.values()))[0] for name, modules in hooks.captures.items()}
    apart = seen["whole"].unflatten(-1, (HEADS, WIDTH))
    last = [int(columns(mask, row)[-1]) for row in range(3)]
    first = [int(columns(mask, row)[0]) for row in range(3)]
    assert torch.equal(seen["z"], apart[range(3), last][:, [1, 3]])
    assert torch.equal(seen["part"], apart[range(3), first][:, [2], 1:])
    assert torch.equal(seen["pattern"], seen["probabilities"][:, [3]])


def test_ablating_a_head_equals_ablating_columns() -> None:
    model, (ids, mask) = Encoder(), BATCHES["right"]
    off = {"select": "first.out", "hook": "forward_pre", "action": "replace", "value": 0, "heads": [2]}
    with under(model, off=off), torch.no_grad():
        hooked = model(ids, mask)
    with torch.no_grad():
        model.first.out.weight[:, 2 * WIDTH : 3 * WIDTH] = 0
        assert torch.equal(hooked, model(ids, mask))


def test_tokens_select_queries_of_attention_patterns() -> None:
    model, (ids, mask) = Encoder(), BATCHES["left"]
    cut = {"select": "second.pattern", "hook": "forward", "action": "replace", "value": 0}
    with (
        under(
            model,
            both=capture("first.pattern", tokens={"query": -1, "key": [0, 1]}),
            rows=capture("first.pattern", tokens={"query": -1}, heads=1),
            whole=capture("first.pattern"),
            cut={**cut, "tokens": {"key": 0}},
            after=capture("second.pattern"),
        ) as hooks,
        torch.no_grad(),
    ):
        model(ids, mask)
    whole = hooks.captures["whole"]["first.pattern"][0]
    both = hooks.captures["both"]["first.pattern"]
    rows = hooks.captures["rows"]["first.pattern"]
    wanted = [
        whole[row, :, columns(mask, row)[-1], columns(mask, row)[key]] for row in range(3) for key in (0, 1)
    ]
    assert torch.equal(both[0], torch.stack(wanted))
    assert both.keys.tolist() == [0, 1] * 3
    assert both.positions.tolist() == [3, 3, 1, 1, 2, 2]
    assert torch.equal(rows[0], torch.stack([whole[r, [1], columns(mask, r)[-1]] for r in range(3)]))
    after = hooks.captures["after"]["second.pattern"][0]
    for row in range(3):
        assert (after[row, :, :, columns(mask, row)[0]] == 0).all()
        assert (after[row, :, :, columns(mask, row)[1:]] > 0).all()


def test_spans_are_found_in_each_sample() -> None:
    class Words:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, token_ids: list[int]) -> str:
            return f"<{token_ids[0]}>"

    model, (ids, mask) = Encoder(), BATCHES["left"]
    text = capture("first", tokens={"text": ["4 5", "11"]})
    with pytest.raises(CompileError, match=r"hooks\.text\.tokens: `text` needs a tokenizer"):
        hookrun.compile({"text": text}, model)
    model.tokenizer = Words()
    with under(model, text=text, span=capture("first", tokens={"span": "who", "missing": "skip"})) as hooks:
        hooks.spans = {"who": [[1, 3], [-1, -1], [0, 1]]}
        model(ids, mask)
    assert hooks.captures["text"]["first"].text == ["<4>", "<5>", "<11>"]
    span = hooks.captures["span"]["first"]
    assert span.positions.tolist() == [1, 2, 0]
    assert span.sample_ids.tolist() == [0, 0, 2]
    with under(model, span=capture("first", tokens={"span": "whom"})) as hooks:
        hooks.spans = {"who": [[1, 3], [0, 1], [0, 1]]}
        with pytest.raises(HookError, match="no span 'whom': did you mean 'who'"):
            model(ids, mask)


def test_hooks_tokens_serves_a_model_without_input_ids() -> None:
    model: Any = nn.Sequential(OrderedDict(layer=nn.Linear(4, 4)))
    x = torch.randn(3, 5, 4)
    ids, mask = BATCHES["left"]
    with hookrun.hooked(model, {"seen": capture("layer", tokens=0)}) as hooks:
        with pytest.raises(HookError, match=r"hooks\.tokens\(input_ids, attention_mask\)"):
            model(x)
        for factor in (1, 2):
            hooks.tokens(ids, mask)
            hooks.samples = [5, 3, 8]
            model(x * factor)
        rows = hooks.captures["seen"]["layer"]
    starts = [int(columns(mask, row)[0]) for row in range(3)]
    assert torch.equal(rows[1], model.layer(2 * x)[range(3), starts])
    assert rows.sample_ids.tolist() == [5, 3, 8] * 2
    refused = pytest.raises(HookrunError, match="found input_ids of shape")
    with hookrun.hooked(Encoder(), {"seen": capture("first", tokens=0)}) as hooks, refused:
        hooks.tokens(x)


def test_a_missing_position_is_an_error_that_names_it() -> None:
    model, (ids, mask) = Encoder(), BATCHES["left"]
    for tokens, what in (
        (3, "sequence 1 of the batch has 2 tokens and no position 3"),
        (-3, "no position -3"),
        ("1:4", "no position 3"),
        ({"position": "2:", "phase": "prompt"}, "no position 2"),
    ):
        with under(model, seen=capture("first", tokens=tokens)), pytest.raises(HookError) as error:
            model(ids, mask)
        assert what in str(error.value)
        assert "missing: skip" in str(error.value)
        assert str(error.value).startswith("hook 'seen' (forward, capture) on first: tokens: ")
    call = ((), {"input_ids": ids})
    for keys, what in (
        ({"select": "first.pattern", "tokens": 0}, "the dimension has size 4 and the call 5 tokens"),
        ({"select": "first", "tokens": {"position": 0, "dim": 3}}, "does not have a dimension 3"),
        ({"select": "embed", "tokens": 0, "index": "1:"}, "`index` picks samples"),
        ({"select": "embed", "tokens": 0, "index": ":, 3"}, "`index` picks samples"),
        ({"select": "embed", "heads": 0}, "the number of heads of embed is unknown"),
        ({"select": "first", "heads": 4}, "there is no head 4 among 4"),
        ({"select": "embed", "heads": {"count": 5, "pick": 0}}, "does not hold 5 heads"),
    ):
        with pytest.raises(CompileError, match=what.replace("`", ".")):
            hookrun.compile({"seen": {"hook": "forward", "action": "capture", **keys}}, model, example=call)
    with pytest.raises(CompileError, match=r"hooks\.h\.tokens: has no meaning on hook type 'grad'"):
        hookrun.compile(one_hook("embed", "grad", "stats", tokens=0), model)


def test_captured_rows_of_a_run_have_their_position(tmp_path: Path) -> None:
    model = Encoder()
    spec = {
        "seen": capture("first", tokens=[0, -1]),
        "some": capture("first", tokens=-1, max_bytes=96),
        "plain": capture("first"),
    }
    with hookrun.record(model, spec, tmp_path / "run") as hooks, torch.no_grad():
        for ids, mask in BATCHES.values():
            model(ids, mask)
    run = hookrun.open_run(tmp_path / "run")
    rows = run.captures["seen"]["first"]
    assert rows.sample_ids.tolist() == [n for n in range(6) for _ in range(2)]
    assert rows.positions.tolist() == [0, 3, 0, 1, 0, 2] * 2
    assert rows.token_ids.tolist() == [3, 6, 7, 8, 9, 11] * 2
    assert rows.text == [""] * 12
    assert rows.where(position=3).tolist() == [1, 7]
    assert rows.where(token=9).tolist() == [4, 10]
    whole = run.captures["plain"]["first"][0:3]
    assert torch.equal(rows[0:2], whole[0, [0, 3]])
    assert run.captures["some"]["first"].token_ids.tolist() == [6, 8]
    assert run.captures["plain"]["first"].positions.tolist() == [-1] * 6
    assert hooks.fired["seen", "first"] == 2


def test_a_position_that_no_pass_computes_is_reported() -> None:
    model, (ids, mask) = Encoder(), BATCHES["left"]
    later = hook("first", "scale", {"phase": "generation"}, factor=0)
    warned = pytest.warns(hookrun.HookrunWarning, match="later fired and found no tensor")
    with warned, hookrun.hooked(model, {"later": later}):
        model(ids, mask)


def test_with_padding_true_padding_counts_like_tokens() -> None:
    model, (ids, mask) = Encoder(), BATCHES["right"]
    with under(model, seen=capture("first", tokens={"position": [0, -1], "padding": True})) as hooks:
        model(ids, mask)
    rows = hooks.captures["seen"]["first"]
    assert rows.positions.tolist() == [0, 4] * 3
    assert rows.token_ids.tolist()[1::2] == [0, 0, 0]


def test_captured_rows_do_not_keep_the_model_alive() -> None:
    model = Encoder()
    alive = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        edit = {"select": "first", "hook": "forward", "action": "scale", "factor": 2, "tokens": -1}
        with hookrun.hooked(model, {"seen": capture("first", tokens=0), "edit": edit}) as hooks:
            model(BATCHES["left"][0])
        kept = hooks.captures
        del hooks, model
        assert alive() is None
        assert kept["seen"]["first"].positions.tolist() == [0, 0, 0]
    finally:
        gc.enable()


def test_tokens_are_refused_in_a_compiled_graph() -> None:
    model, (ids, mask) = Encoder(), BATCHES["left"]
    edit = {"select": "first.out", "hook": "forward_pre", "action": "scale", "factor": 2, "target": "[0]"}
    with hookrun.hooked(model, {"edit": {**edit, "tokens": -1}}) as hooks:
        with pytest.raises(CompileError, match=r"hooks\.edit\.tokens"):
            hooks.compile()
        model(ids, mask)
    with hookrun.hooked(model, {"edit": {**edit, "heads": [1]}}) as hooks, torch.no_grad():
        torch.testing.assert_close(
            hooks.compile(backend="eager", fullgraph=True)(ids, mask), model(ids, mask)
        )


class Placed(nn.Module):
    """A model whose forward takes ids, mask and position ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 1)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        return self.embed(input_ids)  # type: ignore[no-any-return]


def test_without_a_mask_position_ids_give_the_left_padding() -> None:
    def at(clause: Any, positions: list[list[int]], **more: Tensor) -> list[tuple[int, int, int]]:
        model = Placed()
        ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
        hook = {"select": "embed", "hook": "forward", "action": "capture", "tokens": clause}
        with hookrun.hooked(model, {"h": hook}) as hooks:
            model(ids, position_ids=torch.tensor(positions), **more)
        found = hooks.captures["h"]["embed"]
        columns = found.sample_ids, found.positions, found.token_ids
        return list(zip(*(column.tolist() for column in columns), strict=True))  # type: ignore[arg-type]

    whole = [0, 1, 2, 3, 4]
    # padding as numbered by our data sets, and by transformers
    for padded in ([0, 0, 0, 1, 2], [1, 1, 0, 1, 2]):
        assert at([0, -1], [padded, whole]) == [(0, 0, 3), (0, 2, 5), (1, 0, 6), (1, 4, 10)]
        assert len(at("all", [padded, whole])) == 8
    assert at(0, [whole]) == [(0, 0, 1), (1, 0, 6)]  # one row for all
    assert at(0, [[2, 3, 4, 5, 6], whole]) == [(0, 0, 1), (1, 0, 6)]  # positions that do not start at 0
    seen = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    by_mask = at(0, [[0, 0, 0, 1, 2], whole], attention_mask=seen)
    assert by_mask == [(0, 0, 2), (1, 0, 6)]  # a mask takes precedence
    packed = [[0, 1, 2, 0, 1], whole]
    assert at({"id": [4, 7]}, packed) == [(0, 3, 4), (1, 1, 7)]
    assert len(at("all", packed)) == 10
    with pytest.raises(HookError, match="position_ids of the call start again within a row"):
        at(-1, packed)


STARTS = [torch.tensor([11, 12, 13, 14, 15]), torch.tensor([7, 8, 30]), torch.tensor([9, 5, 4, 20])]
NEW = 5
HIDDEN = 32
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STEER = [0.4 * (number % 5) for number in range(HIDDEN)]


def random_weights(model: nn.Module, scale: float = 4) -> nn.Module:
    """Give the model random weights, large enough that the generated tokens differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model.eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 50}
    return random_weights(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ENDS)))


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return random_weights(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **ENDS)))


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return random_weights(
        transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **ends)), scale=3
    )


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
def test_batches_do_not_change_the_captures_of_a_prompt(name: str) -> None:
    make, layer, edits = MODELS[name]
    model = make()
    seen = {"seen": hook(layer, "capture", "all")}
    plan = hookrun.compile({**edits, **seen}, model)
    unhooked = hookrun.compile(seen, model)
    alone = [generated(model, plan, [prompt]) for prompt in STARTS]
    assert [new for [new], _ in alone] != [generated(model, unhooked, [prompt])[0][0] for prompt in STARTS]
    for how in ({}, {"use_cache": False}, {"num_beams": 2}):
        news, rows = generated(model, plan, STARTS, **how)
        values = torch.cat(list(rows))
        for number, prompt in enumerate(STARTS):
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
    passes = itertools.count()
    steer = torch.tensor(STEER)

    def by_hand(module: nn.Module, args: Any, output: Any) -> Any:
        if next(passes) == 0:
            return None
        return output + steer if isinstance(output, Tensor) else (output[0] + steer, *output[1:])

    def new(**how: Any) -> Tensor:
        return model.generate(**left_padded(STARTS), max_new_tokens=NEW, do_sample=False, **how)  # type: ignore[no-any-return]

    handle = model.transformer.h[0].register_forward_hook(by_hand)
    expected = new()
    handle.remove()
    spec = {"steer": hook("transformer.h.0", "add_bias", {"phase": "generation"}, value=STEER)}
    for use_cache in (True, False):
        with hookrun.hooked(model, spec):
            assert torch.equal(new(use_cache=use_cache), expected)
    assert not torch.equal(new(), expected)


DRAFTED: dict[str, dict[str, Any]] = {
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {"assistant_model": gpt2()},
    "early exit": {"assistant_early_exit": 1},
}


@pytest.mark.parametrize("how", DRAFTED)
@pytest.mark.parametrize("tokens", ["all", {"phase": "prompt"}], ids=str)
def test_tokens_are_refused_by_name_in_speculative_decoding(how: str, tokens: Any) -> None:
    model: Any = gpt2()
    with (
        hookrun.hooked(model, {"seen": hook("transformer.h.0", "capture", tokens)}),
        pytest.raises(HookError, match=r"'seen' .* transformer.h.0: tokens: a speculative decoding"),
    ):
        model.generate(torch.tensor([[3, 4, 5, 3, 4]]), max_new_tokens=6, do_sample=False, **DRAFTED[how])


@pytest.mark.parametrize("drafted", [[], [7, 8]], ids=["in a later pass", "with the prompt"])
def test_tokens_are_refused_where_a_generate_of_ones_own_drafts(drafted: list[int]) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 4)

        def forward(self, input_ids: Tensor, past_key_values: tuple[Tensor]) -> Tensor:
            return self.embed(input_ids)  # type: ignore[no-any-return]

        def generate(self, input_ids: Tensor) -> None:
            prompt = [*input_ids[0].tolist(), *drafted]
            for past, new in ((0, prompt), (len(prompt), [9, 5, 4]), (len(prompt) + 1, [6])):
                self(torch.tensor([new]), (torch.zeros(1, 1, past, 2),))

    model = Own()
    with (
        hookrun.hooked(model, {"seen": hook("embed", "capture", "all")}),
        pytest.raises(HookError, match=r"'seen' .* a speculative decoding"),
    ):
        model.generate(torch.tensor([[3, 4, 5]]))


def test_speculative_decoding_leaves_an_encoder_alone() -> None:
    model: Any = t5()
    with hookrun.hooked(model, {"seen": hook("encoder.block.0.layer.1", "capture", "all")}) as hooks:
        model.generate(STARTS[0][None], max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=3)
    assert [len(rows) for rows in hooks.captures["seen"]["encoder.block.0.layer.1"]] == [len(STARTS[0])]


def test_a_run_that_generates_has_the_rows_of_its_prompts(tmp_path: Path) -> None:
    model: Any = gpt2()
    first = {"position": [0, 4, 7], "missing": "skip"}
    spec = {"seen": hook("transformer.h.1", "capture", first)}
    with hookrun.record(model, spec, tmp_path / "run"):
        for prompts in (STARTS[:2], STARTS[2:]):
            model.generate(**left_padded(prompts), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    rows = hookrun.open_run(tmp_path / "run").captures["seen"]["transformer.h.1"]
    assert rows.sample_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert rows.positions.tolist() == [0, 4, 7, 0, 4, 0, 4, 7]


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 0, 1, 1]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [-1, 0, 0, 0, 0, 0, 1, 1, -1]])


@pytest.mark.parametrize("additive", [False, True])
def test_documents_of_a_packed_row_have_no_positions(additive: bool) -> None:
    model = llama()
    ids = torch.arange(3, 21).reshape(2, 9)
    same = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & (DOCUMENTS[:, None] >= 0)
    mask = same.tril()[:, None]
    if additive:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    call = {"input_ids": ids, "attention_mask": mask, "position_ids": PACKED}
    seen = {
        "seen": hook("model.layers.1", "capture", "all"),
        "one": hook("model.layers.0", "capture", {"id": [7]}),
    }
    with hookrun.hooked(model, seen) as hooks, torch.no_grad():
        model(**call)
    rows = hooks.captures["seen"]["model.layers.1"]
    assert torch.equal(rows.token_ids, ids[DOCUMENTS >= 0])
    assert hooks.captures["one"]["model.layers.0"].token_ids.tolist() == [7]
    for tokens in (-1, [0, 2], "1:3"):
        refused = pytest.raises(HookError, match="the row holds several sequences")
        with hookrun.hooked(model, {"seen": hook("model.layers.1", "capture", tokens)}), refused:
            model(**call)


def recurrent(name: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": HIDDEN, "num_hidden_layers": 2}
    ends = {"bos_token_id": 1, "eos_token_id": None}
    special = {
        "rwkv": {"attention_hidden_size": HIDDEN, "context_length": 64},
        "mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    }
    config = transformers.CONFIG_MAPPING[name](**sizes, **ends, **special.get(name, {"state_size": 4}))
    return random_weights(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba", "rwkv"])
def test_passes_of_a_recurrent_state_are_counted_in_a_generation(name: str) -> None:
    model: Any = recurrent(name)
    ids = torch.arange(5, 10)[None]
    layer, target = ("rwkv.blocks.1", {"target": "[0]"}) if name == "rwkv" else ("backbone.layers.1", {})
    specs = {
        "all": hook(layer, "capture", "all", **target),
        "some": hook(layer, "capture", [-1, 6], **target),
        "new": hook(layer, "scale", {"phase": "generation"}, factor=-3.0, **target),
    }
    found = []
    for use_cache in (True, False):
        with hookrun.hooked(model, specs) as hooks:
            out = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=use_cache)
        rows = hooks.captures["all"][layer]
        assert rows.positions.tolist() == list(range(8))
        assert torch.equal(rows.token_ids, out[0, :-1])
        assert hooks.captures["some"][layer].positions.tolist() == [4, 6]
        found.append(out)
    torch.testing.assert_close(*found)


def test_a_state_needs_hooks_tokens_for_its_length() -> None:
    model: Any = recurrent("rwkv")
    ids = torch.arange(5, 10)[None]
    with hookrun.hooked(model, {"seen": hook("rwkv.blocks.1", "capture", "all", target="[0]")}) as hooks:
        state = model(ids[:, :3], use_cache=True).state
        with pytest.raises(HookrunError, match="continues from a recurrent state"):
            model(ids[:, 3:], state=state)
        hooks.tokens(ids[:, :3])
        state = model(ids[:, :3], use_cache=True).state
        hooks.tokens(ids[:, 3:], torch.ones_like(ids))
        model(ids[:, 3:], state=state)
    assert hooks.captures["seen"]["rwkv.blocks.1"].positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_a_prompt_in_chunks_is_refused_with_the_reason() -> None:
    model: Any = llama()
    ids = torch.arange(5, 10)[None]
    for how, reason in (
        ({"prefill_chunk_size": 3}, "3 of the prompt's 5 tokens.* leave prefill_chunk_size out"),
        ({"guidance_scale": 1.5}, "1 of the prompt's 5 tokens.* give `generate` all of it at once"),
    ):
        with (
            hookrun.hooked(model, {"seen": hook("model.layers.1", "capture", "all")}),
            pytest.raises(HookrunError, match=reason),
        ):
            model.generate(ids, max_new_tokens=2, do_sample=False, **how)


def test_tokens_after_the_end_of_a_sequence_are_padding() -> None:
    model: Any = gpt2()
    seen = {"seen": hook("transformer.h.1", "capture", "all")}
    seen["last"] = hook("transformer.h.0", "scale", {"phase": "generation", "position": "1:"}, factor=2)
    plan = hookrun.compile(seen, model)
    plain = [generated(model, plan, [prompt], eos_token_id=99)[0][0] for prompt in STARTS]
    ends = [plain[0][1], plain[1][3]]  # the first prompt ends after its second token
    alone = [generated(model, plan, [prompt], eos_token_id=ends)[1] for prompt in STARTS]
    assert len({len(each.positions) - len(p) for each, p in zip(alone, STARTS, strict=True)}) > 1
    for use_cache in (True, False):
        _, rows = generated(model, plan, STARTS, eos_token_id=ends, use_cache=use_cache)
        values = torch.cat(list(rows))
        for number, one in enumerate(alone):
            mine = rows.sample_ids == number
            assert rows.positions[mine].tolist() == one.positions.tolist()
            torch.testing.assert_close(values[mine], torch.cat(list(one)), rtol=1e-3, atol=1e-3)


def test_a_users_own_loop_calls_hooks_tokens_once_per_prompt() -> None:
    """The model has neither a cache nor a mask."""
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(50, 8)))
    batch = left_padded(STARTS)
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


class Block(nn.Module):
    """Attention with a module for its pattern and one for its concatenated heads."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(12, 12)
        self.pattern = nn.Identity()
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        scores = (heads @ heads.transpose(2, 3)).masked_fill(~mask[:, None, None].bool(), -1e9)
        mixed = self.pattern(scores.softmax(-1)) @ heads
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Takes ids and a mask, with the argument names of transformers."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 12)
        self.first = Block()
        self.second = Block()
        self.checkpointed = checkpointed

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.first(self.embed(input_ids), mask)
        if self.checkpointed:
            return checkpoint(self.second, x, mask, use_reentrant=False)  # type: ignore[no-any-return]
        return self.second(x, mask)  # type: ignore[no-any-return]


@contextmanager
def under(model: nn.Module, example: bool = True, **hooks: Mapping[str, Any]) -> Iterator[Installation]:
    """Compile the hooks with an example, then install them."""
    ids, mask = BATCHES["right"]
    call = ((), {"input_ids": ids, "attention_mask": mask})
    with hookrun.compile(hooks, model, example=call if example else None).install(model) as installed:
        yield installed


def capture(select: str, **keys: Any) -> dict[str, Any]:
    return {"select": select, "hook": "forward", "action": "capture", **keys}


def columns(mask: Tensor, row: int) -> Tensor:
    """The columns of the real tokens of a row, in order."""
    return mask[row].nonzero().squeeze(1)
