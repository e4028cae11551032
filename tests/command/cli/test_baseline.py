"""`baseline: true`: a sweep has an additional job without hooks for all jobs that differ only in their hooks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hookrun.cli import main
from hookrun.report.sweep_facts import SweepData, read_sweep

CLIP = ("-m", "experiment=clip_fc", "baseline=true")


def jobs_of(notes) -> list[tuple[int, bool]]:
    """The seed of each job that ran, and whether it has hooks."""
    return [(experiment.settings.seed, bool(experiment.hooks.hooks)) for experiment, _ in notes.prepared]


def test_each_other_setting_has_one_baseline_before_it(cwd: Path, notes) -> None:
    assert main([*CLIP, "hooks.clip_fc.max=0.001,0.01"]) == 0
    assert jobs_of(notes) == [(0, False), (0, True), (0, True)]
    assert [run_dir.name for _, run_dir in notes.ran] == ["0", "1", "2"]
    notes.prepared.clear()
    assert main([*CLIP, "hooks.clip_fc.max=0.001,0.01", "seed=5,6"]) == 0
    assert jobs_of(notes)[:2] == [(5, False), (6, False)]
    assert len(jobs_of(notes)) == 6


def test_a_sweep_over_experiments_may_set_it(cwd: Path, notes) -> None:
    text = Path(__file__).parents[3].joinpath("conf/experiment/clip_fc.yaml").read_text()
    (cwd / "mine/experiment").mkdir(parents=True)
    (cwd / "mine/experiment/compared.yaml").write_text(f"{text}\nbaseline: true\n")
    mine = ("--config-dir", "mine", "-m")
    assert main([*mine, "experiment=compared", "hooks.clip_fc.max=0.1,0.2"]) == 0
    assert jobs_of(notes) == [(0, False), (0, True), (0, True)]
    notes.prepared.clear()
    assert main([*mine, "experiment=compared,clip_fc"]) == 0
    assert jobs_of(notes) == [(0, False), (0, True), (0, True)]


def test_no_run_without_hooks_is_repeated(cwd: Path, notes) -> None:
    assert main(["-m", "baseline=true", "hooks=none,noise", "seed=5,6"]) == 0
    assert jobs_of(notes) == [(5, False), (6, False), (5, True), (6, True)]
    notes.prepared.clear()
    assert main(["-m", "baseline=true", "seed=5,6"]) == 0
    assert jobs_of(notes) == [(5, False), (6, False)]


def test_the_page_agrees_with_the_sweep_on_baselines(cwd: Path, notes, conf) -> None:
    files = {"experiment/zero": "# @package _global_\nvars: {}\n"}
    for name, top in (("one", 0.1), ("two", 0.2)):
        hook = f"{{select: fc, hook: grad, action: clamp, max: {top}}}"
        files[f"experiment/{name}"] = f"# @package _global_\nvars: {{top: {top}}}\nhooks: {{c: {hook}}}\n"
    for name, key in (("added", "experiment=one,two"), ("alone", "experiment=zero,one")):
        typed = ["-m", "--config-dir", conf(**files), key, "seed=5,6", "baseline=true"]
        assert main([*typed, f"hydra.sweep.dir={name}"]) == 0
        facts = read_sweep(cwd / name)
        assert len(facts.baselines) == 2, name
        assert facts.counts == {"done": len(facts.jobs)}, name
        for job in facts.compared:
            found = facts.baseline_of(job)
            if job.overrides["experiment"] != "zero":
                assert found is not None, name
                assert found.overrides["seed"] == job.overrides["seed"], name


CLAMPED = "hooks: {c: {select: fc, hook: grad, action: clamp, max: '${vars.top}'}}"


def swept(folder: Path, conf, text: str, *typed: str) -> SweepData:
    """The sweep of an experiment with the variables `top` and `rate`, and with this text."""
    mine = f"# @package _global_\nvars: {{top: 0.1, rate: 0.1}}\n{text}\n"
    command = ["-m", "--config-dir", conf(**{"experiment/mine": mine}), "experiment=mine", *typed]
    assert main([*command, f"hydra.sweep.dir={folder}"]) == 0
    return read_sweep(folder)


def test_variables_of_hooks_alone_do_not_repeat_a_baseline(cwd: Path, notes, conf) -> None:
    facts = swept(cwd / "map", conf, CLAMPED, "vars.top=1,2", "+vars.other=1,2,3", "baseline=true")
    assert jobs_of(notes) == [(0, False), *[(0, True)] * 6]
    assert facts.baselines[0].overrides.keys() == {"experiment", "baseline", "hooked"}
    facts = swept(cwd / "seeds", conf, CLAMPED, "vars.top=1,2", "seed=5,6", "baseline=true")
    assert len(facts.baselines) == 2
    assert len(facts.compared) == 4
    for job in facts.compared:
        found = facts.baseline_of(job)
        assert found is not None
        assert found.overrides["seed"] == job.overrides["seed"]


@pytest.mark.parametrize("rate", ["vars.rate", "hooks.d.factor"])
def test_a_variable_used_elsewhere_has_a_baseline_per_value(rate: str, cwd: Path, notes, conf) -> None:
    text = f"""hooks:
  c: {{select: fc, hook: grad, action: clamp, max: "${{vars.top}}"}}
  d: {{select: fc, hook: grad, action: scale, factor: 0.5}}
train: {{optimizer: {{lr: "${{{rate}}}"}}}}"""
    facts = swept(cwd / "mine", conf, text, f"{rate}=0.1,0.2", "vars.top=1,2", "baseline=true")
    rates = [(each.settings.train.optimizer.lr, bool(each.hooks.hooks)) for each, _ in notes.prepared]
    assert rates == [(0.1, False), (0.2, False), *[(0.1, True)] * 2, *[(0.2, True)] * 2]
    for job in facts.compared:
        found = facts.baseline_of(job)
        assert found is not None
        assert found.overrides[rate] == job.overrides[rate]
        assert "vars.top" not in found.overrides


def test_typed_runs_without_hooks_are_not_repeated(cwd: Path, notes, conf) -> None:
    facts = swept(cwd / "mine", conf, CLAMPED, "vars.top=1,2", "seed=5,6", "hooked=true,false")
    assert sorted(jobs_of(notes)) == [(5, False), (5, True), (5, True), (6, False), (6, True), (6, True)]
    for job in facts.compared:
        found = facts.baseline_of(job)
        assert found is not None
        assert found.overrides["seed"] == job.overrides["seed"]


def test_a_configuration_with_its_directory_has_a_baseline(cwd: Path, notes, conf) -> None:
    text = f"{CLAMPED}\nnote_of: 1"
    text = f"{CLAMPED}\ndata: {{root: '${{hydra:runtime.output_dir}}/data'}}"
    swept(cwd / "mine", conf, text, "hooks.c.max=1,2", "baseline=true")
    assert jobs_of(notes) == [(0, False), (0, True), (0, True)]


def test_hooks_can_be_switched_off_for_some_jobs_of_a_sweep(cwd: Path, notes) -> None:
    command = ["-m", "experiment=clip_fc", "hooks.clip_fc.max=0.1,0.2", "hydra.sweep.dir=mine"]
    assert main([*command, "hooked=true,false", "seed=5,6"]) == 0
    assert sorted(jobs_of(notes)) == [(5, False), (5, True), (5, True), (6, False), (6, True), (6, True)]
    facts = read_sweep(cwd / "mine")
    assert len(facts.baselines) == 2
    assert facts.total == 6
    notes.ran.clear()
    assert main(["-m", "resume=mine"]) == 0
    assert notes.ran == []


def test_jobs_without_hooks_do_not_repeat_the_baseline(notes) -> None:
    assert main([*CLIP, "hooks.clip_fc.max=0.1,0.2", "hooked=true,false"]) == 0
    assert sorted(jobs_of(notes)) == [(0, False), (0, True), (0, True)]


def test_a_value_may_come_from_a_hook_that_is_switched_off(cwd: Path, notes, conf) -> None:
    text = """# @package _global_
        hooks: {c: {select: fc, hook: grad, action: clamp, max: 0.1}}
        train: {optimizer: {lr: "${hooks.c.max}"}}"""
    mine = conf(**{"experiment/reads": "\n".join(map(str.strip, text.splitlines()))})
    assert main(["-m", "--config-dir", mine, "experiment=reads", "seed=5,6", "baseline=true"]) == 0
    assert jobs_of(notes) == [(5, False), (6, False), (5, True), (6, True)]


def test_lines_of_jobs_name_their_baseline(cwd: Path, capsys) -> None:
    small = ("train=quick", "objective=val/loss", "compute=cpu", "hydra.sweep.dir=swept")
    assert main([*CLIP, *small]) == 0
    facts = read_sweep(cwd / "swept")
    assert facts.best is not None
    assert facts.best.result is not None
    assert facts.baselines[0].value is not None
    said = f"val/loss {facts.best.result[0]:.4g} (without hooks: {facts.baselines[0].value:.4g}); to minimize"
    out = capsys.readouterr().out
    assert said in out
    assert re.search(r"^\[1/2\] hooked=false  loss ", out, re.MULTILINE)
