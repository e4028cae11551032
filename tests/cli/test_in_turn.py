"""Jobs that share a process leave the same files as each job alone, and as Hydra's own launcher."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from hookrun.cli import jobs, launching, main

SWEEP = [
    "experiment=clip_fc",
    "train.epochs=1",
    "train.limit_batches=1",
    "compute.device=cpu",
    "+vars.limit=0.5",
    "+vars.number=${hydra:job.num}",
    "+hooks.seen={select: fc, hook: forward, action: capture}",
    "seed=3,4",
    "hooks.clip_fc.max=0.01,${vars.limit}",
]
OF_TIME = {"started", "ended", "manifest"}


def test_the_files_equal_those_of_hydra_s_launcher_and_of_each_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, folder = _swept(tmp_path), tmp_path / "sweep"
    for number in ("0", "3"):
        lines = yaml.safe_load((folder / number / ".hydra/overrides.yaml").read_text())
        overrides = [text for text in lines if "hydra:" not in text]
        assert main([*overrides, f"hydra.run.dir={tmp_path / number}"]) == 0
        alone = _files(tmp_path / number)
        there = {path.removeprefix(f"{number}/") for path in ours if path.startswith(f"{number}/")}
        of_both = {path for path in there & alone.keys() if path[0] != "." and path not in OF_SWEEPS}
        assert {"plan.json", "metrics.jsonl", "checkpoints/best.safetensors", "samples.jsonl"} < of_both
        assert [path for path in of_both if ours[f"{number}/{path}"] != alone[path]] == []
    folder.rename(tmp_path / "ours")
    monkeypatch.setattr(launching, "in_turn", lambda launcher: launcher)
    theirs = _swept(tmp_path)
    assert [path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path)] == []
    assert len(ours) > 60
    assert {"0/.hydra/config.yaml", "3/.hydra/hydra.yaml", "3/job.json", "2/metrics.jsonl"} <= ours.keys()


def test_a_job_that_only_chooses_groups_runs_the_checked_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes between two jobs has no effect, wherever the jobs run."""
    monkeypatch.chdir(tmp_path)
    files = [tmp_path / "own/experiment" / f"{name}.yaml" for name in "ab"]
    files[0].parent.mkdir(parents=True)
    text = "# @package _global_\ndefaults: [clip_fc, _self_]\nvars: {limit: 0.5}\ntrain: {steps: 1}\n"
    for file in files:
        file.write_text(text)
    renew = jobs.renew_page

    def edited(sweep_dir: Path, run_dir: Path) -> None:
        renew(sweep_dir, run_dir)
        for file in files:
            file.write_text(text.replace("0.5", "0.25"))

    monkeypatch.setattr(jobs, "renew_page", edited)
    own = ["--config-dir=own", "experiment=a,b", "hydra.job.chdir=true", "hydra.sweep.dir=sweep"]
    assert main(["-m", *own]) == 0
    limits = [
        yaml.safe_load((tmp_path / "sweep" / number / ".hydra/config.yaml").read_text())["vars"]["limit"]
        for number in "01"
    ]
    assert limits == [0.5, 0.5]
    assert Path.cwd() == tmp_path


OF_SWEEPS = {"env.json", "status.json", "report.html", "manifest.json"}
"""What holds the command line, or the hash of what does."""


def _swept(tmp_path: Path) -> dict[str, object]:
    assert main(["-m", *SWEEP, f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
    return _files(tmp_path / "sweep")


def _files(folder: Path) -> dict[str, object]:
    """Path -> content, without the times in it; the page of a sweep contains times and little else."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    of_sweep = {"report.html", "sweep.csv"} if (folder / "multirun.yaml").exists() else set[str]()
    return {name: _content(path) for name, path in found.items() if name not in of_sweep}


def _content(path: Path) -> object:
    if path.name == "status.json":
        return {key: value for key, value in json.loads(path.read_text()).items() if key not in OF_TIME}
    if path.name == "report.html":
        return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)? UTC|<dd>[\d.]+ m?s</dd>", "TIME", path.read_text())
    return path.read_bytes()
