"""Sweeps: all jobs are checked before the first one runs, and a failed job does not stop the others."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf

import hookrun
from hookrun.cli import main
from hookrun.command.sweeps.jobs import JobFailed, SweepJob, require_goal
from hookrun.command.sweeps.sweep import prepare_sweeper, set_direction
from hookrun.errors import SpecError
from hookrun.run.tasks import parse_experiment
from hookrun.store.objective import Goal

Conf = Callable[..., str]
SWEEP = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper: {params: {seed: '5,6'}}\n"


def only_sweep(folder: Path) -> Path:
    return (folder / "multirun/latest").resolve()


def test_every_job_has_its_own_directory(cwd: Path, notes) -> None:
    assert main(["experiment=clip_fc", "-m", "seed=range(5,7)", "train.epochs=1,2"]) == 0
    sweep = only_sweep(cwd)
    assert [run_dir for _, run_dir in notes.ran] == [sweep / str(number) for number in range(4)]
    settings = [experiment.settings for experiment, _ in notes.prepared]
    assert [(each.seed, each.train.epochs) for each in settings] == [(5, 1), (5, 2), (6, 1), (6, 2)]
    assert OmegaConf.load(sweep / "3/.hydra/config.yaml").train.epochs == 2


def test_two_sweeps_have_different_directories(cwd: Path, notes) -> None:
    assert main(["-m", "seed=5"]) == main(["-m", "seed=5"]) == 0
    first, second, latest = sorted((cwd / "multirun").iterdir())
    assert latest.is_symlink()
    assert latest.resolve() == second != first


@pytest.mark.parametrize(
    ("seeds", "code", "done"), [("5,6", 0, 2), ("1,3,5", 1, 1), ("3,2,1,5", 2, 1), ("4,5", 3, 1)]
)
def test_the_exit_code_is_the_most_serious_one_of_all_jobs(seeds, code, done, cwd, notes, capsys) -> None:
    assert main(["-m", f"seed={seeds}"]) == code
    wanted = seeds.split(",")
    assert list(statuses(only_sweep(cwd)).values()).count("done") == done
    assert f"sweep: {done} of {len(wanted)} jobs done, in {only_sweep(cwd)}" in capsys.readouterr().out


def test_a_batch_with_a_failed_job_is_followed_by_the_next(notes) -> None:
    assert main(["-m", "seed=1,5,6", "hydra.sweeper.max_batch_size=1"]) == 1
    assert [seed for seed, _ in notes.ran] == [1, 5, 6]


def test_a_broken_job_is_reported_in_its_directory(cwd: Path, notes) -> None:
    assert main(["-m", "seed=2,5"]) == 2
    status = json.loads((only_sweep(cwd) / "0/status.json").read_text())
    assert status["status"] == "failed"
    assert status["exit_code"] == 2
    assert "hooks.clip_fc.select: nothing matches" in status["reason"]


def test_an_interrupt_ends_the_sweep(notes) -> None:
    assert main(["-m", "seed=5,130,6"]) == 130
    assert [seed for seed, _ in notes.ran] == [5, 130]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("seed=5,6 train.epochs=3,-3", "job #1 (seed=5 train.epochs=-3): train.epochs: found -3"),
        ("seed=5,6 hydra.sweep.subdir=same", "job #1 (seed=6): hydra.sweep.subdir: job #0 has the same directory"),
        ("task=predict,plan", "job #1 (task=plan): task: this job only prints"),
        ("task=predict,modules", "job #1 (task=modules): task: this job only prints"),
        ("seed=5 hydra/launcher=jobblib", "hydra/launcher: there is no 'jobblib'; there are: basic"),
        ("train.optimizer.lr=interval(0.1,1)", "BasicSweeper does not support sweep type"),
        ("seed=glob(*)", "seed: glob(*) stands for no value: glob() picks names of a config group, and this is a key"),
        ("train.epochs=range(5,1)", "train.epochs: range(5,1) stands for no value: the range is empty"),
        ("model=glob(rasnet*)", "stands for no value: it matches none of the config group 'model'"),
        ("model=mlp,cnn hydra.sweep.dir=x/${hydra.runtime.choices.model}", "into hydra.sweep.subdir"),
    ],
)  # fmt: skip
def test_a_wrong_sweep_is_refused_before_its_first_job(typed: str, said: str, cwd, notes, capsys) -> None:
    assert main(["-m", *typed.split()]) == 2
    assert said in capsys.readouterr().err
    assert notes.ran == notes.shown == []
    assert list(cwd.iterdir()) == []


CLIP = "hooks.clip_fc"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["seed=1,2", "seed=3,4"], "seed: is swept over by seed=1,2, and set again by seed=3,4"),
        (["seed=1,2", "++seed=3,4"], "set again by ++seed=3,4"),
        (["seed=1,2", "seed=3"], "set again by seed=3: only the last one would count"),
        (["seed=range(3)", "seed=3,4"], "is swept over by seed=range(3)"),
        ([f"{CLIP}={{max: 1}},{{max: 2}}", f"{CLIP}={{max: 3}},{{max: 4}}"], f"{CLIP}: is swept over by"),
        (
            [f"{CLIP}={{max: 1}},{{min: -2}}", f"{CLIP}.max=3,4"],
            f"{CLIP}.max: is swept over by {CLIP}={{max:",
        ),
        ([f"{CLIP}.max=3,4", f"{CLIP}={{max: 1}}"], f"{CLIP}: is swept over by {CLIP}.max=3,4"),
        (["model=mlp,cnn", "model=cnn,mlp"], "model: is swept over by model=mlp,cnn"),
    ],
    ids=str,
)
def test_a_swept_key_cannot_be_set_again(typed: list[str], said: str, cwd, notes, capsys) -> None:
    assert main(["-m", "experiment=clip_fc", *typed]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "in one list: " in error
    assert notes.ran == []
    assert list(cwd.iterdir()) == []


def test_groups_sweep_together_with_keys_inside_them(notes) -> None:
    keys = [
        "model=mlp,cnn",
        "+model.args={}",
        f"{CLIP}={{min: -1}},{{min: -2}}",
        f"{CLIP}.max=1,2",
        "seed=9",
        "seed=5,6",
    ]
    assert main(["-m", "experiment=clip_fc", *keys]) == 0
    hooks = {hook.action.max for each, _ in notes.prepared for hook in each.hooks.hooks}
    assert hooks == {1, 2}
    assert [seed for seed, _ in notes.ran] == [5, 6] * 8


def test_the_values_of_a_file_are_replaced_as_the_refusal_says(conf, notes, capsys) -> None:
    mine = ["--config-dir", conf(**{"experiment/mine": SWEEP}), "experiment=mine"]
    assert main([*mine, "seed=7,8"]) == 2
    hint = "'hydra.sweeper.params={seed: \"A,B,C\"}'"
    assert hint in capsys.readouterr().err
    assert main([*mine, hint.strip("'").replace("A,B,C", "7,8")]) == 0
    assert [seed for seed, _ in notes.ran] == [7, 8]


def test_a_parameter_of_a_file_is_checked_first_too(conf, cwd, notes, capsys) -> None:
    folder = conf(**{"experiment/mine": SWEEP.replace("5,6", "5,x")})
    assert main(["--config-dir", folder, "experiment=mine"]) == 2
    assert "job #1 (seed=x experiment=mine): seed: found 'x'" in capsys.readouterr().err
    assert notes.ran == []
    assert list(cwd.iterdir()) == []


def test_a_sweep_in_the_directory_of_another_is_refused(notes, capsys) -> None:
    assert main(["-m", "seed=5", "hydra.sweep.dir=mine"]) == 0
    assert main(["-m", "seed=5", "hydra.sweep.dir=mine"]) == 2
    assert "mine/0 already holds a run" in capsys.readouterr().err


def test_a_read_only_sweep_leaves_no_files(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "seed=5,6", "task=plan"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "#0: seed=5 task=plan", "the plan of seed 5", "#1: seed=6 task=plan", "the plan of seed 6",
    ]  # fmt: skip
    assert list(cwd.iterdir()) == []


PLAIN = {"model": {"name": "mlp"}, "data": {"name": "digits"}}
CLEAN = parse_experiment({**PLAIN, "needs": {"clean": {"experiment": "clean", "overrides": ["seed=1"]}}})


def test_a_pickled_job_keeps_the_runs_found_at_the_start() -> None:
    need = CLEAN.settings.needs["clean"]
    job = SweepJob(frozenset({"mypkg"}), needs={need: "/runs/clean"}, previous="/runs/before")
    sent = pickle.loads(pickle.dumps(job))
    assert sent == job
    runs = CLEAN.with_runs(sent.needs, sent.previous).runs
    assert runs == {"clean": "/runs/clean", "previous": "/runs/before"}
    with pytest.raises(SpecError, match=r"experiment clean seed=1 was not known when the sweep began"):
        CLEAN.with_runs({})
    failed = pickle.loads(pickle.dumps(JobFailed("job failed: multirun/0", 3)))
    assert failed.exit_code == 3
    assert str(failed) == "job failed: multirun/0"


class Climber(Sweeper):
    """A sweeper that chooses each job by the objective of the job before."""

    __module__ = "hydra_plugins.climber"
    objectives: list[float] = []

    def __init__(self, start: int, steps: int) -> None:
        self.seed, self.steps = start, steps

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        for number in range(self.steps):
            (job,) = self.launcher.launch([[*arguments, f"seed={self.seed}"]], initial_job_idx=number)
            self.objectives.append(float(job.return_value))
            self.seed += 1


class TestOptimizingSweeper:
    @pytest.fixture
    def folder(self, plugin, conf: Conf) -> str:
        plugin(Climber)
        Climber.objectives = []
        sweeper = "_target_: hydra_plugins.climber.Climber\nstart: 5\nsteps: 2\n"
        return conf(**{"hydra/sweeper/climber": sweeper})

    def test_the_sweeper_gets_the_objective_of_each_job(self, folder: str, notes, capsys) -> None:
        assert main(["-m", "--config-dir", folder, "hydra/sweeper=climber"]) == 0
        assert Climber.objectives == [0.5, 0.6]
        assert "sweep: 2 of 2 jobs done" in capsys.readouterr().out

    def test_the_common_configuration_is_checked_first(self, folder: str, cwd: Path, notes) -> None:
        assert main(["-m", "--config-dir", folder, "hydra/sweeper=climber", "train.epochs=-1"]) == 2
        assert notes.prepared == []
        assert list(cwd.iterdir()) == []

    def test_the_common_configuration_is_compiled_first(self, folder, cwd, notes, capsys) -> None:
        command = ["-m", "--config-dir", folder, "hydra/sweeper=climber"]
        assert main([*command, "+hooks.h={select: nope, hook: forward, action: capture}"]) == 2
        assert "hooks.h.select: 'nope' matches no module of CNN" in capsys.readouterr().err
        assert main([*command, "task=predict"]) == 2
        assert "task=predict logs neither accuracy nor loss" in capsys.readouterr().err
        assert notes.prepared == []
        assert list(cwd.iterdir()) == []

    def test_the_sweeper_may_ignore_the_failure_of_a_job(self, folder, notes, capsys, monkeypatch) -> None:
        command = ["-m", "--config-dir", folder, "hydra/sweeper=climber", "hydra.sweeper.start=0"]
        assert main(command) == 1
        assert Climber.objectives == [0.0]
        assert "job failed with exit code 1" in capsys.readouterr().err
        sweep = Climber.sweep

        def bearing(self: Climber, arguments: list[str]) -> None:
            with pytest.raises(JobFailed):
                sweep(self, arguments)

        monkeypatch.setattr(Climber, "sweep", bearing)
        assert main(command) == 1, "it still counts"

    def test_chosen_values_keep_the_order_of_the_typed_keys(self, folder: str, notes, monkeypatch) -> None:
        hook = "+hooks.x={select:fc,hook:forward,action:scale,factor:1}"

        def chosen_first(self: Climber, arguments: list[str]) -> None:
            self.launcher.launch([["hooks.x.factor=2", "seed=5", hook]], initial_job_idx=0)

        monkeypatch.setattr(Climber, "sweep", chosen_first)
        command = ["-m", "--config-dir", folder, "hydra/sweeper=climber", hook, "seed=5,6"]
        assert main([*command, "hooks.x.factor=1,2"]) == 0
        ((experiment, _),) = notes.prepared
        assert experiment.hooks.hooks[0].action.factor == 2

    def test_a_resumed_sweep_tells_it_the_values_of_finished_jobs(self, folder, cwd, notes, capsys) -> None:
        command = ["-m", "--config-dir", folder, "hydra/sweeper=climber", "hydra.sweep.dir=mine"]
        assert main(command) == 0
        assert main(["--config-dir", folder, "-m", "resume=mine", "hydra.sweeper.steps=3"]) == 0
        assert [seed for seed, _ in notes.ran] == [5, 6, 7]
        assert Climber.objectives == [0.5, 0.6, 0.5, 0.6, 0.7]
        assert "sweep: 3 of 3 jobs done, 2 of them before" in capsys.readouterr().out
        assert main([*command[:-1], "hydra.sweep.dir=stopped", "hydra.sweeper.start=3"]) == 3
        assert main(["--config-dir", folder, "-m", "resume=stopped"]) == 3, "it gets the failure again"
        assert [seed for seed, _ in notes.ran] == [5, 6, 7, 3]

    def test_a_read_only_task_shows_the_common_configuration(self, folder: str, cwd: Path, notes) -> None:
        assert main(["-m", "--config-dir", folder, "hydra/sweeper=climber", "task=plan"]) == 0
        assert len(notes.shown) == 1
        assert list(cwd.iterdir()) == []


SMALL = ("task=evaluate", "compute.device=cpu", "compute.threads=1", "train.limit_batches=1")
SCALE = "+hooks.h={select: fc, hook: forward, action: scale, factor: 1.5}"


def test_problems_of_all_jobs_are_reported_with_overrides(cwd: Path, capsys) -> None:
    command = ["-m", *SMALL, SCALE, "hooks.h.factor=0.5,1.5,x", "hooks.h.select=fc,fcc"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("2 configuration errors\n  job #1 (")
    assert "hooks.h.select: 'fcc' matches no module of CNN; the same in #3" in said
    assert "hooks.h.factor: found 'x'" in said
    assert list(cwd.iterdir()) == []


def test_the_metric_of_an_objective_is_checked_first(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "train.epochs=1,2", "objective=val/acuracy"]) == 2
    said = capsys.readouterr().err
    assert "objective.metric: found 'val/acuracy'" in said
    assert "did you mean 'val/accuracy'" in said
    assert notes.ran == []
    assert list(cwd.iterdir()) == []
    assert main(["-m", *SMALL, "seed=5", "objective=train/loss"]) == 0, "it may be of another task"


ACCURACY = Goal("val/accuracy", "maximize")


class Default(Enum):
    """The default as the sweeper for optuna has it."""

    minimize = 1


def config(*typed: str, **sweeper: Any) -> DictConfig:
    cfg = OmegaConf.create(
        {"hydra": {"sweeper": sweeper, "overrides": {"hydra": list(typed)}}}, flags={"allow_objects": True}
    )
    OmegaConf.set_struct(cfg, True)
    return cfg


def test_an_unset_direction_is_set() -> None:
    cfg = config(direction=Default.minimize, max_failure_rate=0.0)
    assert set_direction(cfg, ACCURACY) == "objective: maximize val/accuracy (best epoch of a run)"
    assert cfg.hydra.sweeper.direction == "maximize"


def test_a_contradicting_direction_is_refused() -> None:
    set_direction(config(direction="maximize"), ACCURACY)
    with pytest.raises(SpecError) as refused:
        set_direction(config(direction="minimize"), ACCURACY)
    assert "objective.direction=minimize" in str(refused.value)
    assert [each.where for each in refused.value.errors] == ["hydra.sweeper.direction", "objective.direction"]
    with pytest.raises(SpecError, match="a run has one objective, val/accuracy"):
        set_direction(config(direction=["minimize", "maximize"]), ACCURACY)


def test_a_sweep_goes_on_after_failed_jobs() -> None:
    for typed, rate in (((), 1.0), (("hydra.sweeper.max_failure_rate=0",), 0.0)):
        cfg = config(*typed, max_failure_rate=0.0)
        prepare_sweeper(cfg, 7)
        assert cfg.hydra.sweeper.max_failure_rate == rate


@pytest.mark.parametrize(("given", "expected"), [(None, 7), (3, 3)])
def test_a_sampler_without_a_seed_gets_the_experiment_s(given: int | None, expected: int) -> None:
    cfg = config(sampler={"seed": given})
    prepare_sweeper(cfg, 2**32 + 7)
    assert cfg.hydra.sweeper.sampler.seed == expected


def test_a_job_with_another_objective_is_refused() -> None:
    require_goal(parse_experiment({**PLAIN, "task": {"name": "train"}}), ACCURACY)
    with pytest.raises(SpecError, match=r"job is to maximize train/accuracy .* sweep is to maximize val/"):
        require_goal(parse_experiment({**PLAIN, "task": {"name": "evaluate", "split": "train"}}), ACCURACY)


def test_a_sweeper_of_unknown_direction_gives_a_note() -> None:
    said = set_direction(config(_target_="hydra_plugins.climber.Climber"), ACCURACY)
    assert "NOTE: Climber has no setting that says which direction is better" in said


@pytest.mark.filterwarnings("ignore")  # of the plugin, which is written for an older optuna
def test_optuna_continues_after_a_rate_that_diverges(cwd: Path, capsys) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install 'hookrun[optuna]'")
    command = [
        "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.n_trials=3",
        "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=9", "hydra.sweep.dir=found", "compute.device=cpu",
        "train.optimizer.lr=1e-08,0.003,1e+30", "model=mlp", "compute.threads=1", "objective=val/loss",
    ]  # fmt: skip
    assert main([*command, "hydra.sweeper.direction=maximize"]) == 2
    assert "the objective is to minimize val/loss" in capsys.readouterr().err
    assert not any(cwd.iterdir())
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "train.optimizer.lr=1e+30  failed" in out
    assert "sweep: 2 of 3 jobs done" in out
    assert "best: job 0 (train.optimizer.lr=0.003), val/loss" in out
    found = OmegaConf.load(cwd / "found/optimization_results.yaml")
    assert found.best_params["train.optimizer.lr"] == 0.003
    again = ["objective=val/accuracy", "hydra.sweep.dir=again", "train.optimizer.lr=1e-08,0.003"]
    same = [text for text in command if not text.startswith(("train.optimizer.lr", "objective"))]
    assert main([*same, *again]) == 0
    found = OmegaConf.load(cwd / "again/optimization_results.yaml")
    assert found.best_params["train.optimizer.lr"] == 0.003
    assert found.best_value > 0.5


SHORT = ["model=mlp", "train.limit_batches=1", "train.epochs=1", "compute.device=cpu", "compute.threads=1"]
CHECK = "+hooks.c={select: fc, hook: forward, action: check, max: 1}"


def statuses(sweep: Path) -> dict[str, str]:
    found = {path.parent.name: json.loads(path.read_text())["status"] for path in sweep.glob("*/status.json")}
    return dict(sorted(found.items()))


@pytest.mark.parametrize(
    ("name", "plugin", "settings"),
    [
        ("joblib", "hydra_joblib_launcher", ["hydra.launcher.n_jobs=2"]),
        ("submitit_local", "hydra_submitit_launcher", ["hydra.launcher.timeout_min=5"]),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the plugins
def test_jobs_in_other_processes_can_be_resumed(
    name: str, plugin: str, settings: list[str], cwd: Path
) -> None:
    extra = name.partition("_")[0]
    pytest.importorskip(f"hydra_plugins.{plugin}", reason=f"pip install 'hookrun[{extra}]'")
    launcher = [f"hydra/launcher={name}", *settings]
    jobs = [CHECK, "hooks.c.max=-1e9,1e9,1e8", "task=evaluate", *SHORT]
    assert main(["-m", *launcher, *jobs, "hydra.sweep.dir=mine", "fail_fast=true"]) == 3
    assert json.loads((cwd / "mine/sweep.json").read_text())["stopped_by"] == "0"
    shutil.rmtree(cwd / "mine/1", ignore_errors=True)
    assert main(["-m", "resume=mine"]) == 3
    assert statuses(cwd / "mine") == {"0": "failed", "1": "done", "2": "done"}
    kept = [hookrun.open_run(cwd / f"mine/{job}").config["hooks"]["c"]["max"] for job in range(3)]
    assert kept == [-1e9, 1e9, 1e8]


@pytest.mark.filterwarnings("ignore")  # of the plugin, which is written for an older optuna
def test_a_resumed_optuna_sweep_chooses_the_same_trials(cwd: Path, capsys) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install 'hookrun[optuna]'")
    command = [
        "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "experiment=clip_fc,add_bias", *SHORT[1:],
        "+hooks.x={select: fc, hook: forward, action: scale, factor: 1}", "hooks.x.factor=interval(0.5,2)",
    ]  # fmt: skip
    assert main([*command, "hydra.sweeper.n_trials=4", "hydra.sweep.dir=whole"]) == 0
    assert main([*command, "hydra.sweeper.n_trials=2", "hydra.sweep.dir=cut"]) == 0
    shutil.rmtree(cwd / "cut/1")
    capsys.readouterr()
    assert main(["-m", "resume=cut", "hydra.sweeper.n_trials=4"]) == 0
    assert "sweep: 4 of 4 jobs done, 1 of them before" in capsys.readouterr().out
    for number in range(4):
        resumed = hookrun.open_run(cwd / f"cut/{number}").config["hooks"]["x"]
        whole = hookrun.open_run(cwd / f"whole/{number}").config["hooks"]["x"]
        assert resumed["factor"] == whole["factor"]


def lines_of(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("[") and "HYDRA" not in line]


def test_a_sweep_prints_one_plan(cwd: Path, capsys) -> None:
    hook = "+hooks.loud={select: fc, hook: forward, action: scale, factor: 2}"
    small = [*SHORT, hook, "strict=false", "+vars.x=choice(1)"]
    assert main(["-m", *small, "seed=0,1"]) == 0
    out = capsys.readouterr().out
    patterns = [rf"\[{n}/2\] \+vars.x=1 seed=[01]  accuracy \d+\.\d %  \d+\.\d s" for n in (1, 2)]
    assert all(re.match(*pair) for pair in zip(patterns, lines_of(out), strict=True)), out
    assert out.count("factor=2") == 1
    assert out.count("run directory") == 0
    assert out.count("report: ") == 1
    assert main(["-m", "-v", *small, "seed=0"]) == 0
    out = capsys.readouterr().out
    assert lines_of(out) == []
    assert out.count("factor=2") == 1
    assert out.count("run directory: ") == 1


def test_the_line_of_a_failed_job_says_so(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "seed=5,1"]) == 1
    failed = lines_of(capsys.readouterr().out)[1]
    assert failed.startswith("[2/2] seed=1  failed  ")


def test_a_glob_finds_experiments_in_folders(cwd: Path, notes) -> None:
    subdir = "hydra.sweep.subdir=${hydra.runtime.choices.experiment}"
    assert main(["-m", "experiment=glob([tutorial/01*,tutorial/02*])", subdir]) == 0
    folders = {path.relative_to(only_sweep(cwd)).as_posix() for _, path in notes.ran}
    assert folders == {"tutorial/01_print_gradient", "tutorial/02_double_gradient"}


def test_a_choice_may_name_the_directory_of_the_sweep(cwd: Path, notes) -> None:
    swept = "hydra.sweep.dir=x/${hydra.runtime.choices.experiment}"
    assert main(["-m", "experiment=clip_fc", "seed=5,6", swept]) == 0
    assert (cwd / "x/clip_fc/1").is_dir()


def test_a_damaged_status_does_not_end_the_sweep(cwd: Path, notes, monkeypatch, capsys) -> None:
    run = notes.execute

    def damaging(prepared: object, run_dir: Path, **options: bool) -> int:
        code = run(prepared, run_dir, **options)
        (run_dir / "status.json").write_text("[1")
        return code

    monkeypatch.setattr("hookrun.run.execute.execute", damaging)
    main(["-m", "seed=5,6"])
    assert [line.split()[2] for line in lines_of(capsys.readouterr().out)] == ["unreadable", "unreadable"]
    assert [seed for seed, _ in notes.ran] == [5, 6]
