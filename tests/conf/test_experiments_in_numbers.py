"""What the comments of experiments state, in numbers: ablations, induction, padding, steering, clamps, pruning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import weights
from torch import Tensor, nn

import hookrun
from hookrun.cli import main
from hookrun.studies.effects.records import Effects


def test_lm_experiments_agree_on_one_trained_model(shipped) -> None:
    silenced: Effects = shipped("lm/head_ablation").effects
    model = next(Path("outputs/needs").glob("*/*/status.json")).parent
    trained = [line for line in hookrun.open_run(model).metrics if line["split"] == "val"][-1]
    assert trained["accuracy"] > 0.95
    assert silenced.axes == {"module": ["blocks.0.attn.z", "blocks.1.attn.z"], "heads": [0, 1, 2, 3]}
    assert silenced["unedited"] > 4
    assert silenced["exact"].min() < silenced["unedited"] - 1
    averaged: Effects = shipped("lm/mean_ablation").effects
    assert averaged.axes == silenced.axes
    assert not averaged["exact"].equal(silenced["exact"])
    patched: Effects = shipped("lm/patch_residual").effects
    cells = {(cell["module"][7], cell["tokens"]): cell for cell in patched.cells()}
    assert cells["1", -5]["exact"] < -4, "in the corrupted sentence the model names the wrong one"
    assert cells["1", -1]["restored"] == pytest.approx(1, abs=1e-6), (
        "the last layer at the last token decides all"
    )
    assert cells["1", -1]["exact"] > 4
    assert cells["0", -5]["exact"] > cells["0", -1]["exact"] + 4, (
        "the name that comes again is read where it stands"
    )
    names: Effects = shipped("lm/name_map").effects
    assert names["placebo"].shape == (8, 2, 4)
    estimates: Effects = shipped("lm/attribution_patching").effects
    assert estimates["gradient"].shape == (2, len(estimates.axes["tokens"]))
    runs = list(Path("outputs/needs").glob("*/*/status.json"))
    assert len(runs) == 2, "the model is trained once for all runs, and so is the clean run"
    circuit: Effects = shipped("lm/circuit", "task.circuit.chance=5").effects
    assert circuit["circuit"][2] > 0.9 > circuit["circuit_chance"][:, 2].mean(), "four heads answer"
    assert circuit["circuit"][3] == pytest.approx(1, abs=1e-6)


def test_the_answer_needs_the_direction_of_a_repeated_name(shipped) -> None:
    """Of the trained model, which is right in over 95 % without the hook: see the test above."""

    def accuracy(*more: str) -> float:
        return float(shipped("lm/refusal_direction", *more).metrics[-1]["accuracy"])

    assert accuracy() < 0.7
    assert accuracy("+hooks.remove.remove=false") < 0.1


def test_what_the_model_would_predict_after_each_layer(shipped) -> None:
    few = ("train.limit_batches=1", "data.batch_size=16", "task.tokens=-1")
    stream = [line for line in shipped("lm/logit_lens", *few).metrics if "module" in line]
    assert [line["module"] for line in stream] == ["embed", "blocks.0.resid_post", "blocks.1.resid_post"]
    assert stream[0]["kl"] > stream[1]["kl"] > 0.1 > stream[2]["kl"] == pytest.approx(0, abs=1e-6)
    assert stream[2]["accuracy"] > 0.9 > 0.5 > stream[0]["accuracy"]


FAST = ("compute.threads=1", "compute.device=cpu", "strict=true")


def test_the_second_layer_of_two_has_induction_heads(shipped) -> None:
    run = shipped("lm/induction", "train.epochs=4", "train.checkpoint.save=none")
    values = [line for line in run.metrics if line["split"] == "val"]
    assert values[0]["accuracy"] < 0.6 < 0.95 < values[-1]["accuracy"]
    assert values[-1]["loss"] < 0.3
    samples = [json.loads(line) for line in Path("outputs/latest/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 64, "written once, not after each epoch"
    patterns = run.captures["patterns"]["blocks.1.attn.pattern"]
    of_heads = list[torch.Tensor]()
    for row in patterns.where(epoch=3).tolist():
        tokens = samples[int(patterns.sample_ids[row])]["tokens"]
        half = (len(tokens) - 1) // 2
        queries = torch.arange(half + 1, 2 * half)  # the last one has no next token
        of_heads.append(patterns[row][:, queries, queries - half + 1].mean(1))
    assert len(of_heads) == 8
    assert torch.stack(of_heads).mean(0).max() > 0.6


def test_a_padded_batch_gives_the_results_of_each_sequence_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment=lm/padding", *FAST]) == 0
    printed = capsys.readouterr()
    assert "WARNING" not in printed.out
    assert printed.err == ""
    sweep = Path("multirun/latest").resolve()
    alone = hookrun.open_run(next(Path("outputs/needs").glob("*/*/status.json")).parent)
    widths = {tuple(row.shape) for row in alone.predictions or ()}
    assert len(widths) > 3, "each sequence is as long as it is"
    for job in ("0", "1"):
        run = hookrun.open_run(sweep / job)
        for module in ("blocks.0.resid_post", "blocks.1.resid_post", "unembed"):
            here = run.captures["last"][module]
            there = alone.captures["last"][module]
            assert len(here) == len(there) == 32
            assert torch.equal(here.sample_ids, there.sample_ids)
            torch.testing.assert_close(here[:], there[:], rtol=1e-4, atol=1e-6)
        lines = [json.loads(line) for line in (sweep / job / "stats.jsonl").read_text().splitlines()]
        differences = [line["abs_max"] for line in lines if line["hook"] == "difference"]
        assert len(differences) == 4
        assert max(differences) < 1e-5


def test_samples_without_padding_need_batches_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment=lm/alone", *FAST, "data.batch_size=2"]) == 2
    assert (
        "data.args.padding: none leaves samples as long as they are, and a batch of 2"
        in capsys.readouterr().err
    )


SMALL = ("task.max_new_tokens=5", "data.batch_size=4")


def continued(name: str, module: str, hook: Any, *, after: int = 0) -> list[list[int]]:
    """The new tokens of the first four sentences, one by one, with a hand-written forward hook after so many passes."""
    model, _ = hookrun.build(experiment=f"lm/{name}", overrides=["compute.device=cpu"])
    model.eval()
    passes = [0]

    def by_hand(owner: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        passes[0] += 1
        return hook(output, passes[0]) if passes[0] > after else None

    model.get_submodule(module).register_forward_hook(by_hand)
    found = []
    for line in hookrun.open_run("outputs/latest").generations:
        passes[0], ids = 0, torch.tensor([line["prompt_ids"]])
        for _ in range(5):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids)[:, -1].argmax(-1)[:, None]], dim=1)
        found.append(ids[0, len(line["prompt_ids"]) :].tolist())
    return found


def test_steering_adds_the_difference_of_the_two_means(shipped) -> None:
    found = shipped("lm/steer", *SMALL, "hooks.steer.value.factor=20")
    used = {run["where"]: run["path"] for run in found.plan["runs"]}
    last, everything = (
        hookrun.open_run(used[f"hooks.steer.value.{key}"])
        .captures["seen"]["blocks.0.resid_post"][:]
        .double()
        .mean(0)
        for key in ("run", "minus.run")
    )
    direction = (20 * (last - everything)).float()
    assert float(direction.norm()) > 1
    assert [line["ids"] for line in found.generations] == continued(
        "steer", "blocks.0.resid_post", lambda output, number: output + direction
    )
    assert found.metrics[-1]["changed"] == 1
    assert found.metrics[-1]["kl_first"] > 0.001


def test_only_the_chosen_neurons_are_clamped(clamped: Path, monkeypatch) -> None:
    """To 40, which is large enough to change the tokens of any trained model."""
    monkeypatch.chdir(clamped)
    found = hookrun.open_run("outputs/latest")
    values = found.captures["seen"]["blocks.1.mlp.act"]
    assert values[:][:, [1, 5]].unique().tolist() == [40.0]
    assert not (values[:][:, [0, 2, 3, 4, 6, 7]] == 40).any()
    assert sorted(set(values.positions.tolist()))
    assert len(values) == 4 * 4

    def by_hand(output: Tensor, number: int) -> Tensor:
        output = output.clone()
        start = output.shape[1] - number + 1  # without a cache every pass computes all tokens
        output[:, start:, [1, 5]] = 40
        return output

    lines = found.generations
    assert [line["ids"] for line in lines] == continued("neuron_clamp", "blocks.1.mlp.act", by_hand, after=1)
    for line in lines:
        assert line["kl_first"] == 0
    assert any(line["ids"] != line["ids_without"] for line in lines)


def test_a_well_chosen_fifth_of_the_weights_suffices(shipped) -> None:
    first = (
        "{select: [conv1.weight, conv2.weight, fc.weight], hook: weight, action: capture, when: {step: 0}}"
    )
    ticket = shipped("lottery", f"+hooks.first={first}")
    (checkpoints,) = Path("outputs/needs").glob("*/*/checkpoints")
    dense = hookrun.open_run(checkpoints.parent)
    chosen_at_random = shipped(
        "lottery", "+hooks.ticket.method=random_unstructured", "~hooks.ticket.importance_scores"
    )
    accuracy = [each.metrics[-1]["accuracy"] for each in (dense, ticket, chosen_at_random)]
    assert accuracy[0] > 0.97
    assert accuracy[1] > 0.95
    assert accuracy[1] > accuracy[2] + 0.02
    trained = weights(dense)
    of_ticket = weights(ticket)
    initial, _ = hookrun.build(experiment="lottery_dense", overrides=["compute.device=cpu"])
    for name in ("conv1.weight", "conv2.weight", "fc.weight"):
        smallest = trained[name].abs().flatten().argsort()[: round(0.8 * trained[name].numel())]
        pruned = of_ticket[name].flatten() == 0
        assert set(pruned.nonzero().flatten().tolist()) == set(smallest.tolist())
        begins = ticket.captures["first"][name][0]
        assert begins.equal(initial.get_parameter(name) * (begins != 0)), "of the dense network"


def test_two_bits_need_a_scale_for_each_channel(shipped) -> None:
    found = shipped("quantize_map").effects
    by_channel = shipped("quantize_map", "hooks.round.per=channel").effects
    assert found.axes == {"module": ["conv1.weight", "conv2.weight", "fc.weight"], "bits": [2, 3, 4, 6, 8]}
    unedited = float(found["unedited"])
    assert unedited == pytest.approx(0.91, abs=0.03)
    assert (found["exact"][:, -1] - unedited).abs().max() < 0.01
    assert found["exact"][1, 0] < unedited - 0.1 < by_channel["exact"][1, 0] - 0.03
