"""Hooks under the Trainers of Lightning and transformers on two gloo ranks: the weights are those of one process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("trainers.py")


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_two_ranks_have_the_weights_of_one_process(library: str, free_port, tmp_path, warm) -> None:
    if find_spec(library) is None or (library == "transformers" and find_spec("accelerate") is None):
        pytest.skip(f"hookrun[{library}] is not installed")
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "TORCHELASTIC_RUN_ID": "hooks",
    }
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    files = [tmp_path / f"{number}.json" for number in range(3)]
    trainings = json.dumps(dict(zip(map(str, files), ({}, *ranks), strict=True)))
    started = warm.start(SCRIPT.read_text(), library, trainings, cwd=tmp_path, stdout=2, stderr=2)
    assert started.wait() == 0
    one, *others = (json.loads(file.read_text()) for file in files)
    for found in others:
        for ours, theirs in zip(one, found, strict=True):
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=1e-6)
