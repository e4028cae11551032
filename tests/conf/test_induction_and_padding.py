"""lm/induction and lm/padding show what their comments say, in numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hookrun
from hookrun.cli import main

FAST = ("compute.threads=1", "compute.device=cpu", "strict=true")


def test_two_layers_of_attention_learn_to_repeat_and_the_second_has_induction_heads(shipped) -> None:
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
    assert "WARNING" not in printed.out and printed.err == ""
    sweep = Path("multirun/latest").resolve()
    alone = hookrun.open_run(next(Path("outputs/needs").glob("*/*/status.json")).parent)
    widths = {tuple(row.shape) for row in alone.predictions or ()}
    assert len(widths) > 3, "each sequence is as long as it is"
    for job in ("0", "1"):
        run = hookrun.open_run(sweep / job)
        for module in ("blocks.0.resid_post", "blocks.1.resid_post", "unembed"):
            here, there = run.captures["last"][module], alone.captures["last"][module]
            assert len(here) == len(there) == 32
            assert torch.equal(here.sample_ids, there.sample_ids)
            torch.testing.assert_close(here[:], there[:], rtol=1e-4, atol=1e-6)
        lines = [json.loads(line) for line in (sweep / job / "stats.jsonl").read_text().splitlines()]
        differences = [line["abs_max"] for line in lines if line["hook"] == "difference"]
        assert len(differences) == 4 and max(differences) < 1e-5


def test_samples_without_padding_need_batches_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment=lm/alone", *FAST, "data.batch_size=2"]) == 2
    assert (
        "data.args.padding: none leaves samples as long as they are, and a batch of 2"
        in capsys.readouterr().err
    )
