"""Two nodes: two agents of torchrun on this machine, the second with a disk of its own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from two_nodes import Disk, agents

import hookrun

SMALL = (
    "model=cnn",
    "data=digits",
    "compute=ddp",
    "compute.device=cpu",
    "compute.threads=1",
    "compute.timeout=60",
)
EVALUATE = (*SMALL, "task=evaluate", "train.limit_batches=2")
CAPTURE = "+hooks.rows={select: fc, hook: forward, action: capture"


def test_each_node_has_its_own_disk_at_the_same_path(disk: Disk, free_port: Any) -> None:
    for number, folder in enumerate(disk.folders):
        (folder / "name").write_text(f"disk of node {number}")
    show = f"import os; print('{{', os.environ['RANK'], open('{disk.path}/name').read(), '}}')"
    with agents(disk, free_port(), program=("--no-python", sys.executable, "-c", show)) as nodes:
        assert [node.wait() for node in nodes] == [0, 0], [node.said() for node in nodes]
        assert "{ 0 disk of node 0 }" in nodes[0].said()
        assert "{ 1 disk of node 1 }" in nodes[1].said()


@pytest.mark.parametrize(
    "hook",
    [
        "+hooks.seen={select: fc, hook: forward, action: stats}",
        "+hooks.checked={select: fc, hook: forward, action: check}",
        CAPTURE + ", when: {rank: 0}}",
        "+hooks.rows={select: fc.weight, hook: weight, action: capture}",
    ],
)
def test_a_run_that_rank_0_alone_writes_needs_no_shared_disk(workers: Any, disk: Disk, hook: str) -> None:
    ended = workers.run(disk.path.parent, *EVALUATE, hook, f"hydra.run.dir={disk.path}/run", disk=disk)
    assert ended.codes == [0, 0], ended.said
    assert hookrun.open_run(disk.folders[0] / "run").status["status"] == "done"
    assert list(disk.folders[1].iterdir()) == []


@pytest.mark.parametrize("typed", [CAPTURE + "}", CAPTURE + ", when: {rank: [0, 1]}}", "task=predict"])
def test_a_run_that_each_rank_writes_is_refused_without_one(workers: Any, disk: Disk, typed: str) -> None:
    ended = workers.run(disk.path.parent, *EVALUATE, typed, f"hydra.run.dir={disk.path}/run", disk=disk)
    assert ended.codes == [2, 2], ended.said
    assert "rank 1 on " in ended.said[0] and "does not see the run directory of rank 0" in ended.said[0]
    assert hookrun.open_run(disk.folders[0] / "run").status["exit_code"] == 2
    assert list(disk.folders[1].iterdir()) == []
