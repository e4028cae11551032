"""`python -m hookrun.verify` reads every byte of a run, and names every file that is not what it should be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hookrun.store.checkpoint import save
from hookrun.store.run_dir import RunDir
from hookrun.store.writer import CaptureWriter
from hookrun.verify import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three shards of captures and a checkpoint."""
    made = RunDir.create(tmp_path / "run")
    made.set_status("running")
    made.captures = CaptureWriter(made.path / "captures", shard_bytes=4_000)
    for step in range(3):
        made.captures.add(
            "h", "m", torch.full((4, 100), float(step)), sample_ids=range(4), epoch=0, step=step, call=0
        )
        made.captures.flush()
    save(nn.Linear(2, 2), made.checkpoints / "last.safetensors")
    made.log_metrics(step=1)
    made.close()
    made.set_status("done")
    return made.path


def shard(run: Path, number: int) -> Path:
    return run / f"captures/{number:06d}.safetensors"


def test_a_whole_run_is_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "3 shards" in said and said.endswith("all well\n")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda run: shard(run, 1).unlink(), "000001.safetensors is missing"),
    "cut off": (lambda run: shard(run, 1).write_bytes(shard(run, 1).read_bytes()[:-7]), "its index says"),
    "one bit": (lambda run: flip(shard(run, 1)), "000001.safetensors was changed: its SHA-256 is"),
    "a checkpoint": (
        lambda run: (run / "checkpoints/last.safetensors").write_bytes(b"x" * 100),
        "last.safetensors is no readable safetensors file",
    ),
    "the plan": (lambda run: (run / "plan.json").write_text("{"), "plan.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_named_and_nothing_else(
    run: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, said = DAMAGE[kind]
    damage(run)
    assert main([str(run)]) == 1
    printed = capsys.readouterr().out
    bad = [line for line in printed.splitlines() if line.startswith("BAD: ")]
    assert len(bad) == 1 and said in bad[0]
    assert printed.endswith("1 bad\n")


def test_every_bad_shard_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard(run, 0).unlink()
    flip(shard(run, 2))
    assert main([str(run)]) == 1
    assert capsys.readouterr().out.count("BAD: ") == 2


def test_what_a_killed_run_leaves_is_no_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "captures/.000003.safetensors.1.tmp").write_bytes(b"half")
    with (run / "captures/index.jsonl").open("a") as index:
        index.write('{"version": 1, "sha')
    assert main([str(run)]) == 1, "it says it is done"
    assert capsys.readouterr().out.count("BAD: ") == 2
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "status": "running"}))
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.count("note: ") == 2


def test_a_lost_index_is_no_empty_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "captures/index.jsonl").unlink()
    (run / "env.json").write_text('{"torch"')
    assert main([str(run)]) == 1
    said = capsys.readouterr().out
    assert f"BAD: {run / 'captures/000000.safetensors'} is in no index" in said and "env.json" in said


def test_a_sweep_is_told_to_name_its_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.parent)]) == 2
    assert "of 1 runs: run" in capsys.readouterr().err


def test_what_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_as_a_module(run: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "hookrun.verify", str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
