"""The list of faults in a run directory, and another run that repeats them bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.store.verify import verify

EVEN = {"step": {"every": 2}}
DRAWING = {"rate", "count", "bits", "per", "seed"}


def test_a_list_is_repeated_bit_for_bit_on_every_kind_of_hook(tmp_path: Path) -> None:
    first = train(HOOKS, tmp_path / "first")
    assert train(HOOKS, tmp_path / "same") == first, "the same seeds"
    assert train(repeating(tmp_path / "first"), tmp_path / "again") == first
    assert train(repeating(tmp_path / "again"), tmp_path / "and again") == first
    seeded = {name: hook | {"seed": 7} for name, hook in HOOKS.items()}
    assert train(seeded, tmp_path / "other")[1] != first[1]
    run = hookrun.open_run(tmp_path / "first")
    assert {line["hook"] for line in run.faults} == set(HOOKS)
    assert len(run.table("faults")) == len(run.faults)
    assert "faults.jsonl" in (run.path / "manifest.json").read_text()
    assert verify(run.path).bad == []
    with (run.path / "faults.jsonl").open("a") as file:
        file.write("{}\n")
    assert any("faults.jsonl" in text for text in verify(run.path).bad)


@pytest.mark.parametrize(
    ("changed", "length", "message"),
    [
        ({}, {"steps": 5}, "fired 4 times there, and this is once more"),
        ({}, {"steps": 3}, "strict: .*fired 3 times, and its list has the faults of 4"),
        ({"index": "0"}, {"batch": 6}, r"call 0 has shape \[5, 8\] in the list and \[6, 8\] here"),
        ({"hook": "forward_pre"}, {}, "expected flip_bits on forward_pre"),
        ({"select": "2"}, {}, "2: part of the run .* was not there"),
        ({"faults": {"run": "nowhere"}}, {}, "there is no .*nowhere"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(
    changed: dict[str, Any], length: dict[str, int], message: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train({"part": HOOKS["part"]}, Path("first"))
    with pytest.raises(hookrun.HookrunError, match=f"(?s){message}"):
        train({"part": repeating("first")["part"] | changed}, Path("again"), **length)


HOOKS: dict[str, dict[str, Any]] = {
    "values": {"select": ["0", "1"], "hook": "forward", "rate": 0.01, "bits": [0, 1, 22]},
    "weights": {"select": "2.weight", "hook": "weight", "count": 2, "bits": [20, 21, 22]},
    "gradients": {"select": "0.weight", "hook": "grad", "count": 1, "bits": [20]},
    "outputs": {"select": "1", "hook": "output_grad", "count": 1, "per": "sample", "bits": [18], "when": EVEN},
    "inputs": {"select": "2", "hook": "backward", "count": 1, "bits": [17]},
    "part": {"select": "1", "hook": "forward", "count": 1, "bits": [19], "index": ":, [1, 5]"},
    "steps": {"select": "0.weight", "hook": "optimizer_step_post", "count": 1, "bits": [22]},
    "saved": {"select": "2", "hook": "saved_tensors", "count": 1, "bits": [22]},
}  # fmt: skip


def repeating(run: str | Path) -> dict[str, dict[str, Any]]:
    """The same hooks with the faults of a run."""
    return {
        name: {key: value for key, value in hook.items() if key not in DRAWING}
        | {"faults": {"run": str(run)}}
        for name, hook in HOOKS.items()
    }


def train(
    hooks: dict[str, dict[str, Any]], run: Path, steps: int = 4, batch: int = 5
) -> tuple[list[bytes], str]:
    """Train in an own loop: the bits of all outputs and weights, and the list of faults."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = list[Tensor]()
    spec = {name: {**hook, "action": "flip_bits"} for name, hook in hooks.items()}
    with hookrun.record(model, spec, run_dir=run, strict=True):
        for _ in range(steps):
            optimizer.zero_grad()
            seen.append(model(torch.randn(batch, 4)))
            seen[-1].square().sum().backward()
            optimizer.step()
    bits = [each.detach().numpy().tobytes() for each in (*seen, *model.parameters())]
    return bits, (run / "faults.jsonl").read_text()
