"""The open run directory: status, plan, metrics, environment; the newest run of a folder, and the link to it."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from report_pages import change_status

from hookrun.run.ranks import Ranks
from hookrun.store.files import StoreError
from hookrun.store.format import EXIT_CODES, State
from hookrun.store.reader import open_run
from hookrun.store.run_dir import (
    RunDir,
    cut_off,
    environment,
    newest_finished,
    newest_unchanged,
    outputs_folder,
    update_latest,
)


def test_a_run_directory_may_be_one_where_hydra_already_wrote(tmp_path: Path) -> None:
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    run = RunDir.create(tmp_path / "run")
    assert run.path == tmp_path / "run"
    assert RunDir.create(tmp_path / "a" / "new" / "one").path.is_dir()


@pytest.mark.parametrize("name", ["status.json", "plan.json", "metrics.jsonl", "captures/index.jsonl"])
def test_a_directory_with_a_run_is_never_written_to(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(StoreError) as caught:
        RunDir.create(tmp_path)
    assert f"{tmp_path} already holds a run: it has {name}" in str(caught.value)


def test_status_has_state_with_reason(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    before = datetime.now(UTC).replace(microsecond=0)
    run.set_status("running")
    started = open_run(run.path).status["started"]
    assert open_run(run.path).status == {
        "status": "running", "reason": "", "started": started, "ended": None, "pid": os.getpid(),
        "host": platform.node(), "exit_code": None,
    }  # fmt: skip
    run.set_status("failed", "loss is NaN at step 3")
    assert open_run(run.path).status["started"] == started
    assert open_run(run.path).status["reason"] == "loss is NaN at step 3"
    times = [datetime.fromisoformat(str(open_run(run.path).status[key])) for key in ("started", "ended")]
    assert before <= times[0] <= times[1] <= datetime.now(UTC)


@pytest.mark.parametrize("state", get_args(State))
def test_each_state_has_its_exit_code_unless_another_is_given(tmp_path: Path, state: State) -> None:
    run = RunDir.create(tmp_path)
    run.set_status(state)
    assert open_run(run.path).status["exit_code"] == EXIT_CODES[state]
    run.set_status(state, exit_code=3)
    assert open_run(run.path).status["exit_code"] == 3


def test_metrics_are_flat_lines_in_order(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.log_metrics(step=0, split="train", loss=torch.tensor(0.5))
    run.log_metrics(step=1, split="train", loss=math.nan)
    run.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == [
        '{"step": 0, "split": "train", "loss": 0.5}',
        '{"step": 1, "split": "train", "loss": "NaN"}',
    ]
    with pytest.raises(TypeError, match="the metric 'losses' is a list"):
        run.log_metrics(losses=[1.0, 2.0])


def test_only_used_files_are_created(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    assert run.captures.folder == tmp_path / "captures"
    run.close()
    assert list(tmp_path.iterdir()) == []
    run.write("env.json", {"python": math.inf})
    assert (tmp_path / "env.json").read_text() == '{\n  "python": "Infinity"\n}\n'


def test_closing_closes_every_file_even_if_one_fails(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.predictions.add("predictions", "output", torch.ones(2), sample_ids=[0, 1], epoch=0, step=0, call=0)
    run.captures.add("features", "fc", torch.ones(2), sample_ids=[0, 1], epoch=0, step=0, call=0)
    (tmp_path / "predictions").write_text("")  # prevents a folder of that name
    with pytest.raises(StoreError, match="2 captured rows are lost"):
        run.close()
    assert (tmp_path / "captures" / "index.jsonl").exists()


def test_closing_waits_until_every_line_is_on_the_disk(tmp_path, monkeypatch) -> None:
    run = RunDir.create(tmp_path / "run")
    flushed = set[int]()
    fsync = os.fsync
    run.log_metrics(loss=0.5)
    run.append("samples.jsonl", [{"sample": 1}])
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.add(os.fstat(file).st_ino), fsync(file)))
    run.close()
    assert flushed == {(run.path / name).stat().st_ino for name in ("metrics.jsonl", "samples.jsonl")}


def test_latest_points_to_the_newest_run(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("deleted")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        assert update_latest(tmp_path / name) == ""
        assert os.readlink(tmp_path / "latest") == name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "second"]


def test_a_users_file_called_latest_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("mine")
    assert "it is left alone" in update_latest(tmp_path / "run")
    assert (tmp_path / "latest").read_text() == "mine"


def test_a_file_system_without_links_gives_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    note = update_latest(tmp_path / "run")
    assert note == f"{tmp_path}/latest does not point to the newest run: Operation not permitted"


def test_a_status_can_be_written_before_torch_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from hookrun.store.run_dir import RunDir;"
        f"run = RunDir.create({str(tmp_path)!r}); run.set_status('running'); run.log_metrics(step=0); run.close();"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
    assert (tmp_path / "status.json").exists()


def test_runs_of_other_machines_are_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    status = {"status": "running", "pid": int(gone.stdout), "host": platform.node()}
    assert cut_off(status).endswith("it was cut off")
    assert cut_off({**status, "host": f"not-{platform.node()}"}) == ""
    assert cut_off({**status, "status": "done"}) == ""
    assert cut_off({**status, "pid": os.getpid()}) == ""

    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert cut_off(status) == ""


class Two(Ranks):
    """One of two ranks, which communicate through the list `sent`."""

    size = 2
    several = True

    def __init__(self, rank: int, sent: list[Any]) -> None:
        self.rank, self._sent = rank, sent

    def gathered(self, plain: Any) -> list[Any]:
        self._sent.append(json.loads(json.dumps(plain)))
        return [[], self._sent[0]]


def test_rank_0_gets_numbers_as_it_would_write_them(tmp_path: Path) -> None:
    record = dict(hook="h", module="m", mean=np.float32(0.5), n=[np.int64(3)], x=math.nan, t="NaN")
    sent = list[Any]()
    main = RunDir.create(tmp_path)
    other = RunDir(tmp_path, ranks=Two(1, sent))
    main.set_status("running")
    main.append("stats.jsonl", [record])
    other.append("stats.jsonl", [record])
    other.take_kept()
    main.ranks = Two(0, sent)
    main.take_kept()
    main.close()
    first, second = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert first == second
    assert len(open_run(tmp_path).stats) == 2


def test_lines_of_ranks_are_in_the_order_of_steps(tmp_path: Path) -> None:
    sent = list[Any]()
    other = RunDir(tmp_path, ranks=Two(1, sent))
    main = RunDir.create(tmp_path)
    main.set_status("running")
    main.ranks = Two(0, sent)
    for step in range(200):
        other.append("stats.jsonl", [{"hook": "h", "epoch": 0, "step": step, "of_rank": 1}])
        main.append("stats.jsonl", [{"hook": "h", "epoch": 0, "step": step, "of_rank": 0}])
    assert not main.keeps_many
    for sample in range(100):
        other.append("samples.jsonl", [{"split": "val", "sample": 2 * sample + 1}])
        main.append("samples.jsonl", [{"split": "val", "sample": 2 * sample}])
        other.batches = main.batches = sample + 1
    assert main.keeps_many
    assert other.keeps_many, "they are to be written before there are more"
    other.take_kept()
    main.take_kept()
    main.append("stats.jsonl", [{"hook": "last", "epoch": 0, "step": 200}])
    main.close()  # no other rank is there to take it
    run = open_run(tmp_path)
    both = [(step, rank) for step in range(200) for rank in range(2)]
    assert [(line["step"], line["of_rank"]) for line in run.stats[:-1]] == both
    assert run.stats[-1]["hook"] == "last"
    assert [line["sample"] for line in run.samples.lines] == list(range(200))


def test_only_rank_0_writes_the_files_of_the_run(tmp_path: Path) -> None:
    main = RunDir.create(tmp_path)
    main.write_pictures([{"split": "val", "sample": 0, "png": ""}])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = RunDir(tmp_path, ranks=Two(1, []))
    other.write_pictures([{"split": "val", "sample": 1, "png": ""}])
    other.write("plan.json", {})
    other.log_metrics(step=1)
    other.set_status("done")
    other.write_manifest()
    other.sync()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert other.ended


def test_a_command_line_that_is_not_utf_8_is_kept_with_escapes() -> None:
    assert environment([os.fsdecode(b"x\xff.py"), "é"])["argv"] == [r"x\udcff.py", "é"]


def test_the_environment_names_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "0123456789abcdef")
    found = environment(argv=["hookrun", "experiment=clip_fc"], device="cpu")
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["argv"] == ["hookrun", "experiment=clip_fc"]
    assert found["device"] == "cpu"
    assert found["threads"] == torch.get_num_threads()
    assert {"torchvision", "hydra", "hookrun", "platform", "cpu_count"} <= set(found)
    assert "0123456789abcdef" not in json.dumps(found)


def finished(folder: Path, name: str, ended: str) -> Path:
    run = RunDir.create(folder / name)
    run.set_status("running")
    run.log_metrics(step=1)
    run.close()
    run.write_manifest()
    run.set_status("done")
    change_status(run.path, ended=ended)
    return run.path


def test_the_environment_variable_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOOKRUN_OUTPUT", str(tmp_path / "x/.."))
    assert outputs_folder() == tmp_path / "outputs"
    monkeypatch.delenv("HOOKRUN_OUTPUT")
    monkeypatch.chdir(tmp_path)
    assert outputs_folder() == tmp_path / "outputs"


def test_the_run_that_ended_last_is_found(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no finished run in"):
        newest_finished(tmp_path)
    long = finished(tmp_path, "a", "2030-01-02")
    finished(tmp_path, "b", "2030-01-01")
    RunDir.create(tmp_path / "c").set_status("running")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/status.json").write_text("{")
    elsewhere = finished(tmp_path / "elsewhere", "e", "2030-01-03")
    (tmp_path / "e").symlink_to(elsewhere)
    assert newest_finished(tmp_path) == long


def test_a_run_whose_files_were_changed_is_skipped(tmp_path: Path) -> None:
    older = finished(tmp_path, "a", "2030-01-01")
    newer = finished(tmp_path, "b", "2030-01-02")
    assert newest_unchanged(tmp_path) == newer
    (newer / "metrics.jsonl").write_text("{}\n")
    assert newest_unchanged(tmp_path) == older
    (older / "manifest.json").unlink()
    assert newest_unchanged(tmp_path) is None
