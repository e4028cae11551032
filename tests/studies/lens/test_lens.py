"""task=lens: the stream after each layer as hand-written hooks see it, and contributions that sum to the logits."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hookrun
from hookrun.errors import HookrunError
from hookrun.report import write_report
from hookrun.store.reader import Run

DATA = ("data=names", "data.batch_size=3", "train.limit_batches=2")
DECODER = ("model=decoder", "model.args.width=16", "model.args.heads=2", *DATA)
LENS = ("task=lens", *DECODER)
IDS = "bos_token_id: 0, eos_token_id: 0, pad_token_id: 0"
SIZES = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: null"
USUAL = f"{SIZES}, num_key_value_heads: 2, {IDS}"
MLP = "intermediate_size: 48"
MODELS = {
    "gpt2": f"n_layer: 2, n_embd: 32, n_head: 4, vocab_size: null, {IDS}",
    "llama": f"{USUAL}, {MLP}, tie_word_embeddings: true, attention_bias: true",
    "gemma2": f"{USUAL}, {MLP}, head_dim: 16, final_logit_softcapping: 3.0",  # (1 + w), post-norms, soft caps
    "cohere": f"{USUAL}, {MLP}, logit_scale: 0.25",  # parallel attention and MLP, scaled logits
    "granite": f"{USUAL}, {MLP}, residual_multiplier: 0.3, logits_scaling: 4.0, embedding_multiplier: 2.0",
}


KEYS = ("sample", "split", "part", "kind", "layer", "position", "token", "text", "top")
OF_ANSWER = ("answer_logit", "wrong_logit", "logit_difference")


def test_lines_of_a_decoder_are_ordered_by_sample(decoder: DecoderLens) -> None:
    places = [(line["sample"], line["layer"] is not None, line["layer"]) for line in decoder.run.lens]
    assert places == sorted(places), "by sample, then part"
    for each in decoder.streams:
        lines = decoder.lines(each)
        assert [line["position"] for line in lines] == list(range(len(each.tokens)))
        assert [line["token"] for line in lines] == each.tokens
        for line in lines:
            assert isinstance(line["text"], str)


def test_the_top_tokens_are_those_of_the_stream_by_hand(decoder: DecoderLens) -> None:
    for each in decoder.streams:
        values, tokens = each.logits.softmax(-1).topk(3)
        for place, line in enumerate(decoder.lines(each)):
            assert [token for token, _, _ in line["top"]] == tokens[place].tolist()
            assert [value for _, _, value in line["top"]] == pytest.approx(values[place].tolist(), rel=1e-4)


def test_the_kl_is_that_of_the_output_from_the_stream(decoder: DecoderLens) -> None:
    metrics = {line["module"]: line for line in decoder.run.metrics if "module" in line}
    kls = defaultdict[str, list[float]](list)
    for each in decoder.streams:
        distance = each.output.log_softmax(-1) - each.logits.log_softmax(-1)
        expected = (each.output.softmax(-1) * distance).sum(-1)
        found = [line["kl_to_output"] for line in decoder.lines(each)]
        assert found == pytest.approx(expected.tolist(), abs=1e-5)
        kls[each.path] += found
    for path, values in kls.items():
        assert metrics[path]["kl"] == pytest.approx(sum(values) / len(values))
    assert metrics["blocks.1.resid_post"]["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["embed"]["positions"] == len(kls["blocks.0.resid_post"])


def test_the_last_line_of_a_prompt_has_its_answer(decoder: DecoderLens) -> None:
    for each in decoder.streams:
        first, *_, last = decoder.lines(each)
        assert list(first) == [*KEYS, "kl_to_output"]
        assert list(last) == [*KEYS, *OF_ANSWER, "kl_to_output"]
        assert first["split"] == "val"
        assert first["kind"] == "residual"
        assert first["layer"] == int(each.path[7])
        assert last["logit_difference"] == last["answer_logit"] - last["wrong_logit"]
        assert last["answer_logit"] == pytest.approx(float(each.logits[-1, each.answer]), abs=1e-4)


def test_the_stream_of_gpt2_is_its_hidden_states(executed, tmp_path) -> None:
    model, weights = drawn(tmp_path / "w.safetensors", *transformer("gpt2"))
    found = executed("task=lens", *transformer("gpt2"), weights, "task.tokens=-1")
    for number, (inputs, target) in enumerate(samples(*transformer("gpt2"))):
        with torch.no_grad():
            output = model(**{name: each[None] for name, each in inputs.items()}, output_hidden_states=True)
        last = int(inputs["attention_mask"].sum()) - 1
        streams = {"embed": output.hidden_states[0], "transformer.h.0": output.hidden_states[1]}
        expected = {
            name: model.lm_head(model.transformer.ln_f(each))[0, last] for name, each in streams.items()
        }
        expected["transformer.h.1"] = output.logits[0, last]
        for name, logits in expected.items():
            line = answers(found, name)[number, last]
            assert line["answer_logit"] == pytest.approx(float(logits[target[last]].detach()), abs=1e-4)


@pytest.mark.parametrize("kind", ["decoder", *MODELS])
def test_contributions_sum_to_the_logits(kind: str, executed, tmp_path) -> None:
    model = (
        (*DECODER, "model.args.positions=rotary", "model.args.layers=3")
        if kind == "decoder"
        else transformer(kind, "model.args.dtype=float64", "data.args.padding=left")
    )
    built, weights = drawn(tmp_path / "w.safetensors", *model)
    within = {"abs": 1e-9} if kind == "gpt2" else {"abs": 2e-4}  # the others' norms are computed in float32
    expected = {}
    for number, (inputs, target) in enumerate(samples(*model)):
        place = int((target != -100).nonzero())
        with torch.no_grad():
            output = built(**{name: each[None] for name, each in inputs.items()})
        logits = (output if kind == "decoder" else output.logits)[0, place]
        if kind == "gemma2":  # the sums are the logits before the soft cap
            logits = torch.atanh(logits / 3) * 3
        expected[number, int(inputs["attention_mask"].sum()) - 1] = float(logits[target[place]])
    for parts in ("layers", "heads") if kind in ("decoder", "gpt2") else ("heads",):
        found = executed("task=lens", *model, weights, f"task.parts={parts}", "task.tokens=-1", "task.top=1")
        assert sums(found, "answer_logit") == pytest.approx(expected, **within)
        names = {(line["part"], line.get("head")) for line in found.lens}
        assert any(head is not None for _, head in names) == (parts == "heads")
    if kind == "decoder":
        whole = executed("task=lens", *model, weights, "task.norm=frozen", "task.tokens=-1")
        last = answers(whole, "blocks.2.resid_post")
        differences = {place: line["logit_difference"] for place, line in last.items()}
        assert sums(found, "logit_difference") == pytest.approx(differences, **within)


def test_a_head_contributes_its_part_of_the_projection(executed, tmp_path) -> None:
    model, weights = drawn(tmp_path / "w.safetensors", *DECODER)
    found = executed(*LENS, weights, "task.parts=heads", "task.tokens=-1")
    kept: dict[str, Tensor] = {}
    model.blocks[1].attn.z.register_forward_hook(lambda module, args, output: kept.update(z=output))
    model.ln_final.register_forward_hook(lambda module, args, output: kept.update(x=args[0]))
    for number, (inputs, target) in enumerate(samples(*DECODER)):
        place = int((target != -100).nonzero())
        with torch.no_grad():
            model(inputs["input_ids"][None], inputs["attention_mask"][None])
            spread = (kept["x"][0, place].var(unbiased=False) + model.ln_final.eps).rsqrt()
            for head in (0, 1):
                added = kept["z"][0, place, head] @ model.blocks[1].attn.heads.weight[head]
                scaled = (added - added.mean()) * spread * model.ln_final.weight
                expected = float(model.unembed.weight[target[place]] @ scaled)
                (line,) = [
                    line
                    for line in found.lens
                    if (line["sample"], line["part"], line.get("head")) == (number, "blocks.1.attn", head)
                ]
                assert line["answer_logit"] == pytest.approx(expected, abs=1e-5)


def test_changes_by_hooks_outside_of_the_parts_are_the_rest(executed, tmp_path) -> None:
    _, weights = drawn(tmp_path / "w.safetensors", *DECODER)
    common = (weights, "task.tokens=-1", "task.top=1")
    hooks = (
        "+hooks.a={select: blocks.0, hook: forward, action: add_bias, value: 0.3}",
        "+hooks.b={select: blocks.1.resid_mid, hook: forward, action: scale, factor: 0.5, index: '..., 0:8'}",
        "+hooks.c={select: blocks.1.attn.heads, hook: forward, action: scale, factor: 0, heads: [1]}",
        "+hooks.d={select: blocks.1.mlp, hook: forward, action: scale, factor: 2}",
        "+hooks.e={select: blocks.0.attn.out, hook: forward, action: scale, factor: 0.5}",
        "+hooks.f={select: ln_final, hook: forward, action: add_bias, value: [0.1" + ", 0.2" * 15 + "]}",
    )
    seen = "+hooks.z={select: unembed, hook: forward, action: capture, tokens: -1}"
    output = executed("task=evaluate", *DECODER, weights, *hooks, seen)
    rows = output.captures["z"]["unembed"][:]
    for parts in ("layers", "heads"):
        found = executed(*LENS, *common, f"task.parts={parts}", *hooks)
        targets = [target[target != -100] for _, target in samples(*DECODER)]
        expected = [float(rows[number, target]) for number, target in enumerate(targets)]
        assert list(sums(found, "answer_logit").values()) == pytest.approx(expected, abs=1e-4)
        names = {line["part"] for line in found.lens}
        assert "(rest)" in names
        if parts == "heads":
            off = [line for line in found.lens if line["part"] == "blocks.1.attn" and line.get("head") == 1]
            assert off
            for line in off:
                assert line["answer_logit"] == 0


def test_hooks_after_the_unembedding_affect_predictions(executed, tmp_path) -> None:
    _, weights = drawn(tmp_path / "w.safetensors", *DECODER)
    common = (*LENS, weights, "task.tokens=-1", "task.top=1", "train.limit_batches=1")
    turned = "+hooks.z={select: unembed, hook: forward, action: scale, factor: -1.0}"
    whole = "+hooks.x={select: '', hook: forward, action: scale, factor: 3.0}"
    plain = concluded(executed(*common))
    for parts in ("residual", "layers"):
        found = executed(*common, whole, turned, f"task.parts={parts}")
        assert concluded(found) == pytest.approx(-3 * plain, rel=1e-3), parts
    assert answers(found, "(rest)")


def test_padding_on_either_side_changes_no_result(executed, tmp_path) -> None:
    _, weights = drawn(tmp_path / "w.safetensors", *DECODER)
    left, right = (
        executed(*LENS, weights, f"data.args.padding={side}", "task.tokens={span: subject}").lens
        for side in ("left", "right")
    )
    names = ("sample", "part", "position", "text")
    assert len(left) == 6 * 3
    assert [[line[name] for name in names] for line in left] == [
        [line[name] for name in names] for line in right
    ]
    assert [line["kl_to_output"] for line in left] == pytest.approx(
        [line["kl_to_output"] for line in right], abs=1e-5
    )


@pytest.mark.parametrize(
    "overrides, said",
    [
        (("task=lens",), "samples of the data 'digits'"),
        ((*LENS, "task.final_norm=ln_finl"), "no module 'ln_finl'"),
        ((*LENS, "task.heads='**.out'"), "`parts: heads`"),
        ((*LENS, "task.tokens={phase: generation}"), "does not generate tokens"),
        ((*LENS, "task.tokens={span: nobody}"), "no span 'nobody'"),
        ((*LENS, "compute.compile=true"), "compute.compile"),
        ((*LENS, "task.top=1000000000000"), "task.top"),
    ],
)  # fmt: skip
def test_models_it_cannot_read_are_refused_before(overrides: tuple[str, ...], said: str, refused) -> None:
    assert said in refused(*overrides)


def test_the_plan_shows_what_is_read(ready) -> None:
    said = " ".join(ready(*LENS, "task.parts=heads", "task.tokens=[0,-1]").lines)
    assert "lens: heads of 2 blocks (blocks.0 to blocks.1) through ln_final" in said
    assert "at tokens [0, -1]" in said
    assert "heads of blocks.0.attn.heads: 2" in said


def test_a_strangers_lines_are_read_within_limits(executed) -> None:
    found = executed(*LENS, "task.top=2", "data=repeated_tokens")
    assert not any("wrong_logit" in line for line in found.lens), "this data has no wrong answers"
    assert any("answer_logit" in line for line in found.lens)
    page = write_report(found.path)
    assert 'class="lens"' in page.read_text()
    assert "resid_post" in page.read_text()
    path = found.path / "lens.jsonl"
    good = json.loads(path.read_text().splitlines()[0])
    bad = [
        {**good, "top": [[1, "<script>alert(1)</script>", "NaN"]]},
        {**good, "top": [[1, "a", 1e308]] * 5000},
        {**good, "position": -1},
        {**good, "part": "x" * 5000},
        {**good, "layer": "0"},
        {"sample": 0},
    ]
    path.write_text("\n".join(json.dumps(each) for each in (good, *bad)) + "\n")
    text = write_report(found.path).read_text()
    assert "<script>alert(1)" not in text
    assert "5 lines are not valid records" in text
    with pytest.raises(HookrunError, match=r"lens\.jsonl, line 3"):
        hookrun.open_run(found.path).lens  # noqa: B018


@dataclass
class Stream:
    """The stream behind one block in the pass of one sample, by hooks written by hand.

    logits, output: [T, V], of the stream and of the whole model; T the real tokens of the sample
    """

    sample: int
    path: str
    tokens: list[int]
    answer: int
    logits: Tensor
    output: Tensor


@dataclass
class DecoderLens:
    """A run of the lens on a decoder, and the streams of the same passes by hand."""

    run: Run
    streams: list[Stream]

    def lines(self, stream: Stream) -> list[dict[str, Any]]:
        """The run's lines of this stream, in their order."""
        of_part = [line for line in self.run.lens if line["part"] == stream.path]
        return [line for line in of_part if line["sample"] == stream.sample]


@pytest.fixture(scope="module")
def decoder(shared, tmp_path_factory) -> DecoderLens:
    model, weights = drawn(tmp_path_factory.mktemp("drawn") / "w.safetensors", *DECODER)
    seen = dict[str, Tensor]()

    def keep(path: str) -> None:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            seen[path] = output

        model.get_submodule(path).register_forward_hook(hook)

    keep("blocks.0.resid_post")
    keep("blocks.1.resid_post")
    streams = []
    for sample, (inputs, target) in enumerate(samples(*DECODER)):
        mask = inputs["attention_mask"]
        count = int(mask.sum())
        with torch.no_grad():
            output = model(inputs["input_ids"][None], mask[None])[0, :count]
            for path, stream in seen.items():
                logits = model.unembed(model.ln_final(stream))[0, :count]
                tokens = inputs["input_ids"][:count].tolist()
                streams.append(Stream(sample, path, tokens, int(target[count - 1]), logits, output))
    return DecoderLens(shared(*LENS, weights, "task.top=3"), streams)


def transformer(kind: str, *more: str) -> tuple[str, ...]:
    config = f"{{model_type: {kind}, {MODELS[kind]}}}"
    return "model=transformers", f"model.args.config={config}", *DATA, *more


def drawn(path: Path, *model: str) -> tuple[nn.Module, str]:
    """The model with every parameter drawn at random, also biases and norms, and the override that loads it."""
    built, _ = hookrun.build(overrides=[*model, "compute.device=cpu"])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.2)
    save_file({name: each.clone().contiguous() for name, each in built.state_dict().items()}, path)
    return built.eval(), f"model.weights={path}"


def sums(run: Run, key: str) -> dict[tuple[int, int], float]:
    found = defaultdict[tuple[int, int], float](float)
    for line in run.lens:
        if key in line:
            found[line["sample"], line["position"]] += line[key]
    return dict(found)


def answers(run: Run, part: str) -> dict[tuple[int, int], dict[str, Any]]:
    return {(line["sample"], line["position"]): line for line in run.lens if line["part"] == part}


def concluded(run: Run) -> float:
    """The logit difference over the whole pass."""
    (line,) = (line for line in run.metrics if "module" not in line)
    value: float = line["logit_difference"]
    return value


def samples(*overrides: str) -> list[tuple[dict[str, Tensor], Tensor]]:
    _, data = hookrun.build(overrides=list(overrides))
    return [data["val"][number] for number in range(6)]
