"""`python -m hookrun.verify` reads every byte of a run, and names every file that is not what it should be.

A run with a manifest is judged by it; one without, which failed or is of an earlier version, by its indexes.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from report_pages import change_status

from hookrun import verify as verify_module
from hookrun.store.files import StoreError, open_inside
from hookrun.store.manifest import manifest_faults, read_manifest, write_manifest
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir
from hookrun.store.states.files import write_state
from hookrun.store.states.tree import flatten
from hookrun.store.verify import verify
from hookrun.verify import main


def shard(run: Path, number: int) -> Path:
    return run / f"captures/{number:06d}.safetensors"


def test_a_complete_run_has_no_faults(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "files with 3 shards, " in said
    assert said.endswith("all well\n")


def test_of_a_sweep_every_run_is_checked(run: Path, tmp_path: Path, capsys) -> None:
    for job in "01":
        shutil.copytree(run, tmp_path / "sweep" / job)
    (tmp_path / "sweep/multirun.yaml").touch()
    shard(tmp_path / "sweep/1", 1).unlink()
    assert main([str(tmp_path / "sweep")]) == 1
    said = capsys.readouterr().out
    assert said.count("shards") == 2
    assert said.count("BAD: ") == 1
    assert main([str(run), str(tmp_path / "sweep/1")]) == 1, "the worst of several"
    assert main([str(tmp_path / "nowhere"), str(run)]) == 2


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change(name: str, old: str, new: str) -> Callable[[Path], object]:
    def changed(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new, 1))

    return changed


def repeat_line(name: str) -> Callable[[Path], object]:
    def repeated(run: Path) -> None:
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join([*lines, lines[-1]]))

    return repeated


def exchange_lines(run: Path) -> None:
    index = run / "captures/index.jsonl"
    first, second, *rest = index.read_text().splitlines(keepends=True)
    index.write_text("".join([second, first, *rest]))


def line_of_another_run(run: Path) -> None:
    """The last line and its shard are those of another run."""
    other = RunDir.create(run.with_name(f"{run.name}-other"))
    for value in range(3):
        other.captures.add(
            "h", "m", torch.full((2, 3), -value), sample_ids=[0, 1], epoch=0, step=value, call=0
        )
        other.captures.flush()
    other.close()
    shutil.copy(shard(other.path, 2), shard(run, 2))
    lines = (run / "captures/index.jsonl").read_text().splitlines()
    others = (other.path / "captures/index.jsonl").read_text().splitlines()
    (run / "captures/index.jsonl").write_text("\n".join([*lines[:2], others[2], ""]))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda run: shard(run, 1).unlink(), "000001.safetensors is missing"),
    "cut off": (lambda run: shard(run, 1).write_bytes(shard(run, 1).read_bytes()[:-7]), "its index says"),
    "one bit": (lambda run: flip(shard(run, 1)), "000001.safetensors was changed: its SHA-256 is"),
    "the plan": (lambda run: (run / "plan.json").write_text("{"), "plan.json"),
    "a shard twice": (repeat_line("captures/index.jsonl"), "the shard '000002.safetensors' is in an earlier"),
    "two lines exchanged": (exchange_lines, "index.jsonl, line 1: it does not follow the line before it"),
    "a line of another run": (
        line_of_another_run,
        "index.jsonl, line 3: it does not follow the line before it",
    ),
    "no shard in a line": (change("captures/index.jsonl", '"rows": 4', '"rows": -4'), "index.jsonl, line 1"),
    "a line that is not JSON": (change("metrics.jsonl", "1}", "1}}"), "metrics.jsonl, line 1: not JSON"),
}


def test_only_damaged_files_are_named(run, tmp_path, capsys) -> None:
    for number, (kind, (damage, said)) in enumerate(DAMAGE.items()):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(run, copy)
        damage(copy)
        assert main([str(copy)]) == 1, kind
        printed = capsys.readouterr().out
        bad = [line for line in printed.splitlines() if line.startswith("BAD: ")]
        assert len(bad) == 1, kind
        assert said in bad[0], kind
        assert printed.endswith("1 bad\n"), kind


def test_the_lines_of_a_resumed_run_follow_those_before(tmp_path: Path) -> None:
    def add(run: RunDir, step: int) -> None:
        run.captures.add(
            "h", "m", torch.full((2,), float(step)), sample_ids=[0, 1], epoch=0, step=step, call=0
        )
        run.captures.flush()

    first = RunDir.create(tmp_path / "run")
    add(first, 0)
    position = first.position()
    add(first, 1)
    first.close()
    again = RunDir.reopen(tmp_path / "run", position)
    again.set_status("running")
    add(again, 2)
    again.close()
    assert verify(again.path).bad == []
    exchange_lines(again.path)
    assert "does not follow the line before" in verify(again.path).bad[0]
    index = again.path / "captures/index.jsonl"
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:1]))
    assert "does not follow the line before" in verify(again.path).bad[0], "and where the first one is gone"


def test_every_bad_shard_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard(run, 0).unlink()
    flip(shard(run, 2))
    assert main([str(run)]) == 1
    assert capsys.readouterr().out.count("BAD: ") == 2


def test_files_left_by_a_killed_run_are_not_faults(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "captures/.000003.safetensors.1.tmp").write_bytes(b"half")
    with (run / "captures/index.jsonl").open("a") as index:
        index.write('{"version": 1, "sha')
    change_status(run, status="done", exit_code=0)
    assert main([str(run)]) == 1
    assert capsys.readouterr().out.count("BAD: ") == 3, "and there is no manifest"
    change_status(run, status="running", ended=None, exit_code=None)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.count("note: ") == 2


def test_a_run_with_a_lost_index_is_not_reported_as_empty(run, capsys) -> None:
    change_status(run, status="done", exit_code=0)
    (run / "captures/index.jsonl").unlink()
    (run / "env.json").write_text('{"torch"')
    assert main([str(run)]) == 1
    said = capsys.readouterr().out
    assert f"BAD: {run / 'captures/000000.safetensors'} is in no index" in said
    assert "env.json" in said


def test_a_directory_without_a_run_is_refused_with_what_it_is(run, tmp_path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    for path, said in ((run.parent, "of 1 runs: run"), (tmp_path / "empty", "is not a run directory")):
        assert main([str(path)]) == 2
        assert said in capsys.readouterr().err


def test_as_a_module(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["verify", str(run)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(verify_module.__file__, run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().err == ""


# ---- by the manifest


def swap_shards(run: Path) -> None:
    shard(run, 0).rename(run / "x")
    shard(run, 1).rename(shard(run, 0))
    (run / "x").rename(shard(run, 1))


BEST = "checkpoints/best.safetensors"
LAST = "checkpoints/last.safetensors"
CHANGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "best deleted": (lambda run: (run / BEST).unlink(), f"{BEST} is missing"),
    "a bit of a checkpoint": (lambda run: flip(run / LAST), f"{LAST} was changed: its SHA-256 is"),
    "a checkpoint emptied": (lambda run: (run / LAST).write_bytes(b""), f"{LAST} has 0 bytes"),
    "a checkpoint more": (lambda run: shutil.copy(run / BEST, run / "checkpoints/x.safetensors"), "was added after"),
    "a checkpoint that is a link": (
        lambda run: ((run / LAST).unlink(), (run / LAST).symlink_to(run / BEST)), f"{LAST} is a link",
    ),
    "captures deleted": (lambda run: shutil.rmtree(run / "captures"), "captures/index.jsonl is missing"),
    "two shards swapped": (swap_shards, "000000.safetensors was changed"),
    "a shard's shape": (change("captures/index.jsonl", "[100]", "[101]"), "captures/index.jsonl was changed"),
    "another loss": (change("metrics.jsonl", "0.25", "0.24"), "metrics.jsonl was changed"),
    "another plan": (change("plan.json", '"h"', '"g"'), "plan.json was changed"),
    "the model deleted": (lambda run: (run / "model.json").unlink(), "model.json is missing"),
    "an event file": (lambda run: flip(run / "tensorboard/events.out"), "events.out was changed"),
    "the exported program": (lambda run: flip(run / "exported.pt2"), "exported.pt2 was changed"),
    "a file more": (lambda run: (run / "notes.txt").write_text(""), "notes.txt is not in the manifest"),
    "the manifest": (change("manifest.json", '"bytes": 7', '"bytes": 8'), "manifest.json was changed: its SHA-256 is"),
    "the manifest deleted": (lambda run: (run / "manifest.json").unlink(), "manifest.json: No such file"),
}  # fmt: skip


def test_every_change_since_the_end_is_named(whole, tmp_path, capsys) -> None:
    assert main([str(whole)]) == 0, capsys.readouterr().out
    for number, (kind, (damage, said)) in enumerate(CHANGED.items()):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(whole, copy)
        damage(copy)
        capsys.readouterr()
        assert main([str(copy)]) == 1, kind
        assert said in capsys.readouterr().out, kind


def test_each_changed_file_is_named_once(whole: Path) -> None:
    flip(shard(whole, 2))
    (whole / "plan.json").write_text("{")
    with (whole / "metrics.jsonl").open("a") as file:
        file.write('{"lo')
    bad = verify(whole).bad
    assert len(bad) == 3
    for name in ("captures/000002.safetensors", "metrics.jsonl", "plan.json"):
        assert sum(name in line for line in bad) == 1


def test_the_manifest_lists_every_lasting_file(whole: Path) -> None:
    files = json.loads((whole / "manifest.json").read_text())["files"]
    there = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    assert set(files) == there - {"manifest.json", "status.json", "report.html"}
    for name, record in files.items():
        content = (whole / name).read_bytes()
        assert record == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    found = hashlib.sha256((whole / "manifest.json").read_bytes()).hexdigest()
    assert open_run(whole).status["manifest"] == found


def test_a_shard_that_its_writer_hashed_is_not_read_again(whole, monkeypatch) -> None:
    before = json.loads((whole / "manifest.json").read_text())
    opened = list[str]()

    def recording(path: Path, root: Path | None = None) -> AbstractContextManager[BinaryIO]:
        opened.append(path.name)
        return open_inside(path, root)

    monkeypatch.setattr("hookrun.store.manifest.open_inside", recording)
    write_manifest(whole)
    assert "last.safetensors" in opened
    for name in opened:
        assert not name.startswith("0000")
    assert json.loads((whole / "manifest.json").read_text()) == before


def test_a_manifest_that_cannot_be_written_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RunDir(run)

    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refused)
    with pytest.raises(StoreError, match=r"manifest\.json: No space left on device"):
        made.write_manifest()
    assert not (run / "manifest.json").exists()


def test_an_index_must_agree_with_the_manifest(whole: Path) -> None:
    manifest = read_manifest(whole, open_run(whole).status["manifest"])
    assert list(manifest_faults(whole, manifest, {})) == []
    shards = "captures/000000.safetensors"
    ((name, fault),) = manifest_faults(whole, manifest, {shards: "0" * 64})
    assert name == shards
    assert "has another SHA-256 in its index" in fault


CONTRADICTORY: list[dict[str, object]] = [
    {"status": "failed"}, {"status": "interrupted"}, {"status": "running"}, {"status": "stopped"}, {"status": "DONE"},
    {"exit_code": 1}, {"exit_code": None}, {"manifest": None}, {"ended": None}, {"started": None}, {"ended": "soon"},
    {"started": "2999-01-01T00:00:00+00:00"}, {"started": "2026-01-01T00:00:00"},
    {"status": "running", "exit_code": None}, {"status": "running", "ended": None},
]  # fmt: skip


@pytest.mark.parametrize("changed", CONTRADICTORY, ids=json.dumps)
def test_a_status_that_contradicts_itself_is_a_fault(whole: Path, changed: dict[str, object]) -> None:
    assert verify(whole).bad == []
    change_status(whole, **changed)
    assert any("status.json contradicts itself" in line for line in verify(whole).bad)


def test_finished_runs_have_only_whole_states(whole: Path) -> None:
    state = write_state(whole, "{}", *flatten({"x": torch.zeros(2)}))
    assert verify(whole).bad == []
    hidden = [state / "more", state / "in/side", state.with_name("state_x") / "y", state.with_name("state_7")]
    for path in hidden:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    state.with_name("state_000009").symlink_to(state)
    (state / "tensors.safetensors").write_bytes(b"")
    bad = verify(whole).bad
    assert len(bad) == 6
    assert sum("belongs to no state" in line for line in bad) == 5
    assert sum("is damaged" in line for line in bad) == 1


def test_verify_shows_twenty_names_at_most(whole: Path, capsys) -> None:
    whole = whole.rename(whole.with_name("bad\x1b[2J"))
    (whole / "a\nrun: 0 shards, 0 bytes, all well").write_text("")
    for number in range(60):
        (whole / f"\x1b[2J\u202e{number}").write_text("")
    assert main([str(whole)]) == 1
    *lines, more, verdict = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert more == "and 41 more"
    assert verdict.endswith("61 bad")
    for line in lines:
        assert line.startswith("BAD: ")
        assert line.isprintable()


# ---- without one


RUNNING = {"status": "running", "ended": None, "exit_code": None}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"status": "failed", "exit_code": 1}, "note: it failed, so it has no manifest"),
        ({"status": "interrupted"}, "note: it was interrupted, so it has no manifest"),
        (RUNNING | {"pid": 2**31 - 1}, "it was cut off; it has no manifest"),
        (RUNNING, "all well so far: the run has not ended"),
    ],
)
def test_a_run_without_a_manifest_has_its_files_checked(
    run: Path, changed: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_status(run, **changed)
    assert main([str(run)]) == 0
    assert said in capsys.readouterr().out
    flip(shard(run, 1))
    assert main([str(run)]) == 1
    assert "000001.safetensors was changed" in capsys.readouterr().out
