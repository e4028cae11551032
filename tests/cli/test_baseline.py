"""`baseline: true`: a sweep has one more job, without hooks, for all jobs that differ in their hooks alone."""

from __future__ import annotations

from pathlib import Path

from hookrun.cli import main

CLIP = ("-m", "experiment=clip_fc", "baseline=true")


def jobs_of(notes) -> list[tuple[int, bool]]:
    """Of each job that ran: its seed, and whether it has hooks."""
    return [(experiment.settings.seed, bool(experiment.hooks.hooks)) for experiment, _ in notes.prepared]


def test_it_is_made_once_before_the_others_and_once_for_each_of_the_other_settings(cwd: Path, notes) -> None:
    assert main([*CLIP, "hooks.clip_fc.max=0.001,0.01"]) == 0
    assert jobs_of(notes) == [(0, False), (0, True), (0, True)]
    assert [run_dir.name for _, run_dir in notes.ran] == ["0", "1", "2"]
    notes.prepared.clear()
    assert main([*CLIP, "hooks.clip_fc.max=0.001,0.01", "seed=5,6"]) == 0
    assert jobs_of(notes)[:2] == [(5, False), (6, False)] and len(jobs_of(notes)) == 6


def test_jobs_that_are_the_same_run_without_hooks_share_one(cwd: Path, notes) -> None:
    assert main([*CLIP, "+vars.limit=0.1,0.2", "hooks.clip_fc.max=${vars.limit}"]) == 0
    assert jobs_of(notes) == [(0, False), (0, True), (0, True)]
    notes.prepared.clear()
    assert main(["-m", "baseline=true", "hooks=none,noise"]) == 0
    assert jobs_of(notes) == [(0, False), (0, True)], "one is there already"
    notes.prepared.clear()
    assert main(["-m", "experiment=clip_fc", "hooks.clip_fc.max=0.001,0.01"]) == 0
    assert jobs_of(notes) == [(0, True), (0, True)], "nobody asked for one"


def test_an_experiment_may_ask_for_it_alone_or_among_others(cwd: Path, notes) -> None:
    text = Path(__file__).parents[2].joinpath("conf/experiment/clip_fc.yaml").read_text()
    (cwd / "mine/experiment").mkdir(parents=True)
    (cwd / "mine/experiment/compared.yaml").write_text(f"{text}\nbaseline: true\n")
    mine = ("--config-dir", "mine", "-m")
    assert main([*mine, "experiment=compared", "hooks.clip_fc.max=0.1,0.2"]) == 0
    assert jobs_of(notes) == [(0, False), (0, True), (0, True)]
    notes.prepared.clear()
    assert main([*mine, "experiment=compared,clip_fc"]) == 0
    assert jobs_of(notes) == [(0, False), (0, True), (0, True)]


def test_what_cannot_have_one_says_so(cwd: Path, notes, capsys) -> None:
    assert main(["experiment=clip_fc", "baseline=true"]) == 0
    assert "baseline: true is for sweeps (-m)" in capsys.readouterr().out
    assert main(["-m", "baseline=maybe", "seed=1,2"]) == 2
    assert "baseline: found 'maybe'" in capsys.readouterr().err
