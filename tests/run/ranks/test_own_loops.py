"""Hooks in a user's own loop and under the Trainers of Lightning and transformers, on two ranks as in one process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

LOOP = Path(__file__).with_name("own_loop.py")


def test_hooks_under_a_wrapper_see_reduced_gradients(free_port, warm, tmp_path) -> None:
    port = free_port()
    files = [tmp_path / "0", tmp_path / "1"]
    with files[0].open("w") as one, files[1].open("w") as two:
        pair = [
            warm.start(LOOP.read_text(), rank, port, stdout=file, stderr=2)
            for rank, file in enumerate((one, two))
        ]
        assert [each.wait() for each in pair] == [0, 0]
    found, other = (json.loads(each.read_text()) for each in files)
    assert found == other
    refused = {name: found.pop(name) for name in list(found) if isinstance(found[name], str)}
    assert len(found) == 17, "each order of hooks and wrapper"
    assert max(found.values()) < 1e-6
    assert "not summed over the ranks under no_sync()" in refused["grad under no_sync"]
    assert "not summed over the ranks under set_requires_gradient_sync(False)" in refused["grad without sync"]
    assert "the parameter 0.weight was replaced after hooks were installed" in refused["replaced"]
    assert "does not sum its gradient over the ranks" in refused["added to a wrapped model"]


SCRIPT = Path(__file__).with_name("trainers.py")


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_two_ranks_have_the_weights_of_one_process(library: str, free_port, tmp_path, warm) -> None:
    if find_spec(library) is None or (library == "transformers" and find_spec("accelerate") is None):
        pytest.skip(f"hookrun[{library}] is not installed")
    shared = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "hooks",
    }  # fmt: skip
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    files = [tmp_path / f"{number}.json" for number in range(3)]
    trainings = json.dumps(dict(zip(map(str, files), ({}, *ranks), strict=True)))
    started = warm.start(SCRIPT.read_text(), library, trainings, cwd=tmp_path, stdout=2, stderr=2)
    assert started.wait() == 0
    one, *others = (json.loads(file.read_text()) for file in files)
    for found in others:
        for ours, theirs in zip(one, found, strict=True):
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=1e-6)
