"""Hooks in a loop of the user's own on two ranks: right whichever of hooks and wrapper comes first, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LOOP = Path(__file__).with_name("own_loop.py")
ROOT = LOOP.parents[2]


def test_hooks_under_a_wrapper_see_reduced_gradients(free_port: Any) -> None:
    port = free_port()
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pair = [
        subprocess.Popen(
            [sys.executable, str(LOOP), str(rank), port], stdout=subprocess.PIPE, text=True, env=variables
        )
        for rank in range(2)
    ]
    said = [each.communicate()[0] for each in pair]
    assert [each.returncode for each in pair] == [0, 0]
    found, other = (json.loads(each) for each in said)
    assert found == other
    refused = {name: found.pop(name) for name in list(found) if isinstance(found[name], str)}
    assert sorted(found) == sorted(
        [
            *(
                f"{what}, {parts}"
                for what in (
                    "DDP, then hooks",
                    "fully_shard first",
                    "hooks first",
                    "hooks on DDP",
                    "hooks, then DDP",
                )
                for parts in (1, 2)
            ),
            "a look at the model before the backward",
            "after a failed backward",
            "no_sync",
        ]
    )
    assert max(found.values()) < 1e-6
    assert "under no_sync() no rank has it whole" in refused["grad under no_sync"]
    assert "under set_requires_gradient_sync(False) no rank has it whole" in refused["grad without sync"]
    assert "the parameter 0.weight was replaced after hooks were installed" in refused["replaced"]
    assert "does not sum its gradient over the ranks" in refused["added to a wrapped model"]
