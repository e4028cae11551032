"""Two nodes: two agents of torchrun on this machine, the second with a disk of its own."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import HashStore
from two_nodes import Disk, agents
from warm_processes import WarmProcesses

import hookrun
from hookrun.cli import main
from hookrun.command.cli import restarts
from hookrun.command.compose.compose import compose_dict
from hookrun.run.execute import execute_as_rank
from hookrun.run.passes.agreement import differing_ranks, facts_of_rank
from hookrun.run.ranks import Ranks
from hookrun.run.tasks import parse_experiment, prepare
from hookrun.store.files import StoreError

SMALL = (
    "model=cnn",
    "data=digits",
    "compute=ddp",
    "compute.device=cpu",
    "compute.threads=1",
    "compute.timeout=60",
)
EVALUATE = (*SMALL, "task=evaluate", "train.limit_batches=2")
TRAIN = (
    *SMALL,
    "train.epochs=1",
    "train.limit_batches=4",
    "train.checkpoint={every: {steps: 1}, keep: 9, keep_done: true}",
)
CAPTURE = "+hooks.rows={select: fc, hook: forward, action: capture"


def test_each_node_has_its_own_disk_at_the_same_path(warm: WarmProcesses, disk: Disk, free_port: Any) -> None:
    for number, folder in enumerate(disk.folders):
        (folder / "name").write_text(f"disk of node {number}")
    show = f"import os; print('{{', os.environ['RANK'], open('{disk.path}/name').read(), '}}')"
    with agents(warm, disk, free_port(), program=("--no-python", sys.executable, "-c", show)) as nodes:
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
    assert "rank 1 on " in ended.said[0]
    assert "does not see the run directory of rank 0" in ended.said[0]
    assert hookrun.open_run(disk.folders[0] / "run").status["exit_code"] == 2
    assert list(disk.folders[1].iterdir()) == []


def test_each_setting_that_differs_is_named_with_both_values(workers: Any, tmp_path: Path) -> None:
    lr = "+train.optimizer={name: SGD, lr: 0.1}"
    last = ["train.optimizer.lr=0.7", "train.checkpoint.keep=3", "seed=1"]
    ended = workers.run(tmp_path, *TRAIN, lr, "hydra.run.dir=run", ranks=3, last=last)
    assert ended.codes == [2, 2, 2], ended.said
    assert ended.said[1:] == ["", ""], ended.said
    assert "rank 2 has train.optimizer.lr 0.7, rank 0 has 0.1" in ended.said[0]
    assert "rank 2 has train.checkpoint.keep 3, rank 0 has 9" in ended.said[0]
    assert "rank 2 has seed 1, rank 0 has 0" in ended.said[0]
    assert "rank 2 has parameters.conv1.weight float32 [32, 1, 3, 3] " in ended.said[0]
    assert "rank 1" not in ended.said[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_changes_no_result_may_differ(workers: Any, tmp_path: Path, strategy: str) -> None:
    last = ["compute.threads=2", "compute.capture_buffer=8", "data.workers=1", "tags=[b]", "+trust=[numpy]"]
    typed = [
        f"compute.strategy={strategy}",
        "+data.transforms={random_horizontal_flip: {}}",
        "data=fake_images",
    ]
    ended = workers.run(tmp_path, *EVALUATE, *typed, "hydra.run.dir=run", last=last)
    assert ended.codes == [0, 0], ended.said


def test_files_of_one_name_with_another_content_are_refused(workers: Any, disk: Disk) -> None:
    for number, folder in enumerate(disk.folders):
        rows = {
            "input": torch.full((40, 1, 8, 8), float(number)),
            "target": torch.zeros(40, dtype=torch.int64),
        }
        save_file(rows, folder / "rows.safetensors")
    data = ("data=tensors", "model.args.num_classes=2", f"data.args.file={disk.path}/rows.safetensors")
    run = f"hydra.run.dir={disk.path}/run"
    ended = workers.run(disk.path.parent, *EVALUATE, *data, run, disk=disk)
    assert ended.codes == [2, 2], ended.said
    assert f"rank 1 has files.{disk.path}/rows.safetensors" in ended.said[0]
    assert "rank 1 has samples.val.first" in ended.said[0]
    (disk.folders[1] / "rows.safetensors").unlink()
    ended = workers.run(disk.path.parent, *EVALUATE, *data, run, disk=disk)
    assert ended.codes == [1, 2], ended.said
    assert "rank 1 cannot run the experiment, and rank 0 can" in ended.said[0]
    assert f"there is no file {disk.path}/rows.safetensors" in ended.said[0]


@pytest.mark.parametrize(
    "wrong, name, content, reason",
    [
        (0, "mine", "compute: {strategy: none}", "a run uses one"),
        (1, "other", "", "there is no 'mine'"),
        (1, "mine", "hooks: {a: {select: fc, hook: forward, action: statz}}", "did you mean 'stats'"),
    ],
)
def test_a_mistake_on_one_node_ends_all_with_its_reason(
    workers: Any, disk: Disk, wrong: int, name: str, content: str, reason: str
) -> None:
    for number, folder in enumerate(disk.folders):
        own = (name, content) if number == wrong else ("mine", "")
        file = folder / f"conf/experiment/{own[0]}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"# @package _global_\ndefaults: [override /compute: ddp]\n{own[1]}\n")
    typed = (*SMALL[:2], *SMALL[3:], "task=evaluate", f"--config-dir={disk.path}/conf", "experiment=mine")
    ended = workers.run(disk.path.parent, *typed, f"hydra.run.dir={disk.path}/run", disk=disk)
    assert ended.codes == ([2, 2] if wrong == 0 else [1, 2]), ended.said
    assert reason in ended.said[0]
    assert ended.said[1] == ""
    assert ("rank 1 cannot run the experiment, and rank 0 can" in ended.said[0]) is (wrong == 1)


OWN = """
import os
import re
import numpy as np
import torch

RANK = int(os.environ["RANK"])

class Data:
    def __init__(self, kind):
        self.kind = kind
        self.generator = np.random.default_rng()

    def __len__(self):
        return 40 + (RANK if self.kind == "length" else 0)

    def __getitem__(self, index):
        image = np.full((1, 8, 8), index, dtype=np.float32)
        if self.kind == "last" and index == len(self) - 1:
            image[0, 0, 0] += RANK
        if self.kind == "own":
            image += self.generator.random()
        if self.kind == "global":
            image += np.random.rand()
        return image, index % 2

def build(split, kind):
    return Data(kind)
"""


@pytest.mark.parametrize(
    "kind, what",
    [
        ("length", "samples.val.number 41, rank 0 has 40"),
        ("last", "samples.val.last"),
        ("own", ""),
        ("global", ""),
    ],
)
def test_own_data_is_compared_by_samples(workers: Any, cwd: Path, kind: str, what: str) -> None:
    (cwd / "ranks_data.py").write_text(OWN)
    own = ("data=python", "data.factory=ranks_data:build", f"+data.args.kind={kind}", "+trust=[ranks_data]")
    ended = workers.run(cwd, *EVALUATE, *own, "model.args.num_classes=2", "hydra.run.dir=run")
    assert ended.codes == ([2, 2] if what else [0, 0]), ended.said
    assert not what or f"rank 1 has {what}" in ended.said[0]


def test_weights_of_the_nodes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(parse_experiment(compose_dict([*EVALUATE[:2], "task=evaluate"])))
    one = facts_of_rank(ready, Path("/tmp/run"))
    monkeypatch.setattr("hookrun.run.passes.resuming.__version__", "0.0")
    monkeypatch.setattr("torch.__version__", "1.0")
    with torch.no_grad():
        ready.model.fc.bias[3] += 1  # type: ignore[attr-defined]
    (problem,) = differing_ranks([one, one, facts_of_rank(ready, Path("/tmp/run"))]).errors
    told = [line.strip().partition(" float32")[0] for line in problem.what.splitlines()[1:]]
    assert told[0] == f"rank 2 has hookrun 0.0, rank 0 has {one['hookrun']}"
    assert told[1].startswith("rank 2 has torch 1.0, rank 0 has ")
    assert told[2:] == ["rank 2 has parameters.fc.bias"]


def test_a_run_behind_a_link_counts_by_what_is_in_it(cwd: Path) -> None:
    """As on nodes whose disks have other names behind the same one."""
    argv = ["model=cnn", "data=digits", "task=evaluate", "train.limit_batches=1"]
    assert main([*argv, CAPTURE + "}", "hydra.run.dir=one"]) == 0
    shutil.copytree("one", "other")
    value = "{run: link, capture: rows, sample: mean}"
    asked = parse_experiment(
        compose_dict([*argv, f"+hooks.set={{select: fc, hook: forward, action: replace, value: {value}}}"])
    )

    def facts(target: str) -> dict[str, Any]:
        Path("link").unlink(missing_ok=True)
        Path("link").symlink_to(target)
        return facts_of_rank(prepare(asked), cwd / "run")

    one = facts("one")
    assert facts("other") == one
    status = (cwd / "one/status.json").read_text()
    another_century = re.sub(r'"20(?=\d\d-\d\d-)', '"19', status)  # its times alone, not a hash in it
    assert another_century != status
    (cwd / "other/status.json").write_text(another_century)
    (problem,) = differing_ranks([one, facts("other")]).errors
    assert problem.what.count("rank 1 has") == 1
    assert "rank 1 has files.link " in problem.what


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_node_without_the_directory_that_is_resumed_ends_all(
    workers: Any, disk: Disk, lacking: int
) -> None:
    folder = disk.path / "run"
    assert workers.run(disk.path.parent, *TRAIN, f"hydra.run.dir={folder}", disk=disk).codes == [0, 0]
    cut(disk.folders[0] / "run", 1)
    if lacking == 0:
        shutil.move(disk.folders[0] / "run", disk.folders[1] / "run")
    ended = workers.run(disk.path.parent, f"resume={folder}", disk=disk)
    assert ended.codes == [(lacking == 0 and 2) or 1, 2], ended.said
    assert f"there is no directory {folder}" in ended.said[0]
    assert ("rank 1 cannot run the experiment, and rank 0 can" in ended.said[0]) is (lacking == 1)


def test_ranks_resume_from_one_state(workers: Any, disk: Disk) -> None:
    """A node whose disk holds an older copy of the run is refused."""
    folder = disk.path / "run"
    assert workers.run(disk.path.parent, *TRAIN, f"hydra.run.dir={folder}", disk=disk).codes == [0, 0]
    cut(disk.folders[0] / "run", 2)
    shutil.copytree(disk.folders[0] / "run", disk.folders[1] / "run")
    ended = workers.run(disk.path.parent, f"resume={folder}", disk=disk)
    assert ended.codes == [2, 2], ended.said
    assert "rank 1 on" in ended.said[0]


def cut(run: Path, states: int) -> None:
    """As if the run had failed after its first states."""
    for state in sorted(run.glob("checkpoints/state_*"))[states:]:
        shutil.rmtree(state)
    (run / "status.json").write_text(json.dumps({"status": "failed"}))


DIES = """
import os
import sys
from hookrun.cli import main
from hookrun.run.passes.resuming import Resuming

kept = Resuming.point

def dies(self, *args, **options):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], self._hooks.clock.step) == ("1", "0", 3):
        os.kill(os.getpid(), 9)
    return kept(self, *args, **options)

Resuming.point = dies
sys.exit(main(sys.argv[1:]))
"""


def test_a_restart_by_torchrun_goes_on_in_the_same_directory(
    workers: Any, warm: WarmProcesses, disk: Disk, free_port: Any, same: Any
) -> None:
    """Rank 1 is killed in the middle of an epoch; nobody names the directory."""
    start = disk.starts[0]
    argv = (*TRAIN, CAPTURE + "}")
    assert workers.run(start, *argv, "hydra.run.dir=whole").codes == [0, 0]
    script = start / "dies.py"
    script.write_text(DIES)
    with agents(warm, disk, free_port(), *argv, restarts=1, own_disk=False, program=[str(script)]) as nodes:
        assert [node.wait() for node in nodes] == [0, 0], [node.said() for node in nodes]
        said = nodes[0].said()
    (folder,) = (each for each in (start / "outputs").iterdir() if not each.is_symlink())
    assert f"torchrun has started the run again: it goes on in {folder}" in said
    assert "resumed from state_00000" in said
    one = hookrun.open_run(start / "whole")
    other = hookrun.open_run(folder)
    assert other.status["status"] == "done"
    same.weights(one, other, atol=0.0)
    assert one.metrics == other.metrics
    assert torch.equal(same.rows_of(one, "rows", "fc")[:], same.rows_of(other, "rows", "fc")[:])


def test_a_restart_resumes_the_same_configuration_only(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("model=cnn", "data=digits", *TRAIN[3:], "hydra.run.dir=run")
    assert main(list(argv)) == 0
    cut(cwd / "run", 1)
    assert main(list(argv)) == 2
    assert "already holds a run" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main([*argv, "seed=1"]) == 2
    assert "is of another configuration" in capsys.readouterr().err
    assert main(list(argv)) == 0
    assert "resumed from state_000001" in capsys.readouterr().out
    cut(cwd / "run", 0)
    assert main(list(argv)) == 0
    assert "the run starts from the beginning" in capsys.readouterr().out
    assert hookrun.open_run(cwd / "run").status["status"] == "done"


def test_a_second_run_of_the_processes_is_no_restart(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(restarts, "_agent_store", lambda: store)
    assert main(["model=cnn", "data=digits", *TRAIN[3:], "hydra.run.dir=first"]) == 0
    restarts.tell_begun(cwd / "first")
    monkeypatch.setattr(restarts, "_PROCESS", "of the next command")
    assert restarts.begun_before(cwd / "second") is None
    cut(cwd / "first", 1)
    assert restarts.begun_before(cwd / "second") == cwd / "first"


class SecondRank(Ranks):
    """Rank 1 of a run whose rank 0 reads a state with the digest of another one."""

    rank = 1

    def __init__(self, run: Path) -> None:
        self.run = run

    def gathered(self, plain: Any) -> list[Any]:
        return [[str(self.run), ["state_000001", "00000000"]]]


def test_a_rank_that_reads_another_state_is_refused(cwd: Path) -> None:
    assert main(["model=cnn", "data=digits", *TRAIN[3:], "hydra.run.dir=run"]) == 0
    with pytest.raises(StoreError, match=r"state_000001 is another state .* rank 0 reads \(rank 1\)"):
        execute_as_rank(None, SecondRank(cwd / "run"))  # type: ignore[arg-type]


def test_what_another_rank_left_refuses_a_new_run(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cwd / "run" / "captures").mkdir(parents=True)
    (cwd / "run" / "captures" / "index_1.jsonl").write_text("")
    assert main(["model=cnn", "data=digits", "task=evaluate", "hydra.run.dir=run"]) != 0
    assert "already holds a run: it has captures/index_1.jsonl" in capsys.readouterr().err
