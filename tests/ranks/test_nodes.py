"""Two nodes: two agents of torchrun on this machine, the second with a disk of its own."""

from __future__ import annotations

import sys
from typing import Any

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


def test_each_node_has_its_own_disk_at_the_same_path(workers: Any, disk: Disk, free_port: Any) -> None:
    """So do the processes that the tests keep, and those of torchrun."""
    for number, folder in enumerate(disk.folders):
        (folder / "name").write_text(f"disk of node {number}")
    show = f"import os; print('{{', os.environ['RANK'], open('{disk.path}/name').read(), '}}')"
    with agents(disk, free_port(), program=("--no-python", sys.executable, "-c", show)) as nodes:
        assert [node.wait() for node in nodes] == [0, 0], [node.said() for node in nodes]
        assert "{ 0 disk of node 0 }" in nodes[0].said()
        assert "{ 1 disk of node 1 }" in nodes[1].said()
    argv = (*SMALL, "task=evaluate", f"hydra.run.dir={disk.path}/run")
    ended = workers.run(disk.path.parent, *argv, disk=disk)
    assert ended.codes == [0, 0], ended.said
    assert hookrun.open_run(disk.folders[0] / "run").status["status"] == "done"
    assert not (disk.folders[1] / "run").exists()
