"""Sweeps: all jobs are checked before the first one runs, and a failed job does not stop the others."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from hookrun.cli import main
from hookrun.sweeps.jobs import JobFailed, SweepJob

Conf = Callable[..., str]
SWEEP = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper: {params: {seed: '5,6'}}\n"


def only_sweep(folder: Path) -> Path:
    (sweep,) = (folder / "multirun").iterdir()
    return sweep


def test_every_job_has_its_own_directory(cwd: Path, notes) -> None:
    assert main(["-m", "experiment=clip_fc", "seed=5,6", "train.epochs=1,2"]) == 0
    sweep = only_sweep(cwd)
    assert [run_dir for _, run_dir in notes.ran] == [sweep / str(number) for number in range(4)]
    settings = [experiment.settings for experiment, _ in notes.prepared]
    assert [(each.seed, each.train.epochs) for each in settings] == [(5, 1), (5, 2), (6, 1), (6, 2)]
    assert OmegaConf.load(sweep / "3/.hydra/config.yaml").train.epochs == 2


def test_two_sweeps_have_different_directories(cwd: Path, notes) -> None:
    assert main(["-m", "seed=5"]) == main(["-m", "seed=5"]) == 0
    assert len(list((cwd / "multirun").iterdir())) == 2


def test_an_experiment_file_can_define_a_sweep(conf: Conf, notes) -> None:
    assert main(["--config-dir", conf(**{"experiment/mine": SWEEP}), "experiment=mine"]) == 0
    assert [seed for seed, _ in notes.ran] == [5, 6]


def test_experiments_can_be_swept_over(conf: Conf, notes) -> None:
    folder = conf(
        **{f"experiment/{name}": f"# @package _global_\nseed: {name[1]}\n" for name in ("a5", "b6")}
    )
    assert main(["--config-dir", folder, "-m", "experiment=a5,b6"]) == 0
    assert [seed for seed, _ in notes.ran] == [5, 6]


@pytest.mark.parametrize(
    ("seeds", "code", "done"),
    [("5,6", 0, 2), ("1,3,5", 1, 1), ("3,2,1,5", 2, 1), ("4,5", 3, 1)],
)
def test_the_exit_code_is_the_most_serious_and_the_other_jobs_run(
    seeds, code, done, cwd: Path, notes, capsys
) -> None:
    assert main(["-m", f"seed={seeds}"]) == code
    wanted = seeds.split(",")
    statuses = [
        json.loads((only_sweep(cwd) / str(n) / "status.json").read_text()) for n in range(len(wanted))
    ]
    assert [status["status"] for status in statuses].count("done") == done
    assert f"sweep: {done} of {len(wanted)} jobs done, in {only_sweep(cwd)}" in capsys.readouterr().out


def test_a_batch_with_a_failed_job_is_followed_by_the_next(notes) -> None:
    assert main(["-m", "seed=1,5,6", "hydra.sweeper.max_batch_size=1"]) == 1
    assert [seed for seed, _ in notes.ran] == [1, 5, 6]


def test_a_job_that_does_not_compile_is_reported_in_its_directory(cwd: Path, notes) -> None:
    assert main(["-m", "seed=2,5"]) == 2
    status = json.loads((only_sweep(cwd) / "0/status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("failed", 2)
    assert "hooks.clip_fc.select: nothing matches" in status["reason"]


def test_an_interrupt_ends_the_sweep(notes) -> None:
    assert main(["-m", "seed=5,130,6"]) == 130
    assert [seed for seed, _ in notes.ran] == [5, 130]


def test_the_refused_job_is_named_by_its_overrides(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "seed=5,6", "train.epochs=3,-3"]) == 2
    assert "job #1 (seed=5 train.epochs=-3): train.epochs: found -3" in capsys.readouterr().err
    assert list(cwd.iterdir()) == []


def test_a_parameter_of_a_file_is_checked_before_the_first_job_too(
    conf: Conf, cwd: Path, notes, capsys
) -> None:
    folder = conf(**{"experiment/mine": SWEEP.replace("5,6", "5,x")})
    assert main(["--config-dir", folder, "experiment=mine"]) == 2
    assert "job #1 (seed=x experiment=mine): seed: found 'x'" in capsys.readouterr().err
    assert (notes.ran, list(cwd.iterdir())) == ([], [])


def test_jobs_that_would_share_a_directory_are_refused(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "seed=5,6", "hydra.sweep.subdir=same"]) == 2
    assert "job #1 (seed=6): hydra.sweep.subdir: job #0 has the same directory" in capsys.readouterr().err
    assert list(cwd.iterdir()) == []


def test_a_sweep_in_the_directory_of_another_is_refused(notes, capsys) -> None:
    assert main(["-m", "seed=5", "hydra.sweep.dir=mine"]) == 0
    assert main(["-m", "seed=5", "hydra.sweep.dir=mine"]) == 2
    assert "mine/0 already holds a run" in capsys.readouterr().err


def test_a_read_only_sweep_shows_every_job_and_leaves_no_files(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "seed=5,6", "task=plan"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "#0: seed=5 task=plan",
        "the plan of seed 5",
        "#1: seed=6 task=plan",
        "the plan of seed 6",
    ]
    assert list(cwd.iterdir()) == []


def test_a_job_that_only_prints_is_refused_beside_jobs_that_are_run(cwd: Path, notes, capsys) -> None:
    for shown in ("plan", "modules"):
        assert main(["-m", f"task=predict,{shown}"]) == 2
        assert f"job #1 (task={shown}): task: this job only prints" in capsys.readouterr().err
    assert notes.ran == notes.shown == [] and list(cwd.iterdir()) == []


def test_a_job_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(SweepJob(frozenset({"mypkg"})))) == SweepJob(frozenset({"mypkg"}))
    failed = pickle.loads(pickle.dumps(JobFailed("multirun/0", 3)))
    assert (failed.exit_code, str(failed)) == (3, "job failed with exit code 3: multirun/0")


def test_an_unknown_launcher_is_refused(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "seed=5", "hydra/launcher=jobblib"]) == 2
    assert "hydra/launcher: there is no 'jobblib'; there are: basic" in capsys.readouterr().err
    assert list(cwd.iterdir()) == []


def test_a_sweep_that_the_sweeper_cannot_do_is_refused(cwd: Path, notes, capsys) -> None:
    assert main(["-m", "train.optimizer.lr=interval(0.1,1)"]) == 2
    assert "BasicSweeper does not support sweep type" in capsys.readouterr().err
    assert list(cwd.iterdir()) == []


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
    @pytest.fixture(autouse=True)
    def climber(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Install the sweeper as the package `hydra_plugins.climber`."""
        plugins = Plugins.instance()  # scans for plugins the first time, and must find the real ones
        package, module = ModuleType("hydra_plugins"), ModuleType("hydra_plugins.climber")
        package.climber, module.Climber = module, Climber  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "hydra_plugins", package)
        monkeypatch.setitem(sys.modules, "hydra_plugins.climber", module)
        plugins.register(Climber)
        Climber.objectives = []
        yield
        del plugins.class_name_to_class["hydra_plugins.climber.Climber"]
        for known in plugins.plugin_type_to_subclass_list.values():
            if Climber in known:
                known.remove(Climber)

    @pytest.fixture
    def folder(self, conf: Conf) -> str:
        sweeper = "_target_: hydra_plugins.climber.Climber\nstart: 5\nsteps: 2\n"
        return conf(**{"hydra/sweeper/climber": sweeper})

    def test_the_sweeper_gets_the_objective_of_each_job(self, folder: str, notes, capsys) -> None:
        assert main(["-m", "--config-dir", folder, "hydra/sweeper=climber"]) == 0
        assert Climber.objectives == [0.5, 0.6]
        assert "sweep: 2 of 2 jobs done" in capsys.readouterr().out

    def test_the_common_configuration_is_checked_first(self, folder: str, cwd: Path, notes) -> None:
        assert main(["-m", "--config-dir", folder, "hydra/sweeper=climber", "train.epochs=-1"]) == 2
        assert (notes.prepared, list(cwd.iterdir())) == ([], [])

    def test_the_common_configuration_is_compiled_first_and_its_objective_is_checked(
        self, folder: str, cwd: Path, notes, capsys
    ) -> None:
        command = ["-m", "--config-dir", folder, "hydra/sweeper=climber"]
        assert main([*command, "+hooks.h={select: nope, hook: forward, action: capture}"]) == 2
        assert "hooks.h.select: 'nope' matches no module of CNN" in capsys.readouterr().err
        assert main([*command, "task=predict"]) == 2
        assert "task=predict logs neither accuracy nor loss" in capsys.readouterr().err
        assert (notes.prepared, list(cwd.iterdir())) == ([], [])

    def test_the_sweeper_gets_the_failure_of_a_job(self, folder: str, notes, capsys) -> None:
        command = ["-m", "--config-dir", folder, "hydra/sweeper=climber", "hydra.sweeper.start=0"]
        assert main(command) == 1
        assert Climber.objectives == [0.0]
        assert "job failed with exit code 1" in capsys.readouterr().err

    def test_a_failure_that_the_sweeper_ignores_still_counts(self, folder, notes, monkeypatch) -> None:
        monkeypatch.setattr(Climber, "sweep", self._bear(Climber.sweep))
        command = ["-m", "--config-dir", folder, "hydra/sweeper=climber", "hydra.sweeper.start=0"]
        assert main(command) == 1

    @staticmethod
    def _bear(sweep: Callable[..., None]) -> Callable[..., None]:
        def bearing(self: Climber, arguments: list[str]) -> None:
            with pytest.raises(JobFailed):
                sweep(self, arguments)

        return bearing

    def test_chosen_values_keep_the_order_of_the_typed_keys(self, folder: str, notes, monkeypatch) -> None:
        hook = "+hooks.x={select:fc,hook:forward,action:scale,factor:1}"

        def chosen_first(self: Climber, arguments: list[str]) -> None:
            self.launcher.launch([["hooks.x.factor=2", "seed=5", hook]], initial_job_idx=0)

        monkeypatch.setattr(Climber, "sweep", chosen_first)
        command = ["-m", "--config-dir", folder, "hydra/sweeper=climber", hook, "seed=5,6"]
        assert main([*command, "hooks.x.factor=1,2"]) == 0
        ((experiment, _),) = notes.prepared
        assert experiment.hooks.hooks[0].action.factor == 2

    def test_in_a_resumed_sweep_it_gets_the_values_of_the_finished_jobs(
        self, folder: str, cwd: Path, notes, capsys
    ) -> None:
        command = ["-m", "--config-dir", folder, "hydra/sweeper=climber", "hydra.sweep.dir=mine"]
        assert main(command) == 0
        assert main(["--config-dir", folder, "-m", "resume=mine", "hydra.sweeper.steps=3"]) == 0
        assert [seed for seed, _ in notes.ran] == [5, 6, 7]
        assert Climber.objectives == [0.5, 0.6, 0.5, 0.6, 0.7]
        assert "sweep: 3 of 3 jobs done, 2 of them before" in capsys.readouterr().out

    def test_a_read_only_task_shows_the_common_configuration(self, folder: str, cwd: Path, notes) -> None:
        assert main(["-m", "--config-dir", folder, "hydra/sweeper=climber", "task=plan"]) == 0
        assert (len(notes.shown), list(cwd.iterdir())) == (1, [])
