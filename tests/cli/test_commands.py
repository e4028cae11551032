"""One command line: what it composes and checks, and which files it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hookrun.cli import main

Conf = Callable[..., str]
OWN = "# @package _global_\nseed: 7\n"


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only_run(folder: Path) -> Path:
    (run,) = (entry for entry in (folder / "outputs").iterdir() if not entry.is_symlink())
    return run


def test_a_run_has_its_own_directory_with_its_configuration(cwd: Path, notes) -> None:
    assert main(["experiment=clip_fc", "seed=5"]) == 0
    assert main(["experiment=clip_fc", "seed=5"]) == 0
    first, second, latest = sorted((cwd / "outputs").iterdir())
    assert latest.resolve() == second.resolve()
    assert [run_dir for _, run_dir in notes.ran] == [first, second]
    assert OmegaConf.load(first / ".hydra/config.yaml").hooks.clip_fc.max == 0.01
    assert OmegaConf.load(first / ".hydra/overrides.yaml") == ["experiment=clip_fc", "seed=5"]
    assert left(first) == [".hydra", "status.json"]  # no log file by Hydra


def test_the_model_is_built_once_before_the_directory_is_made(cwd: Path, notes, monkeypatch) -> None:
    seen = []
    prepare = notes.prepare
    monkeypatch.setattr(
        "hookrun.tasks.prepare", lambda e, trust: (seen.append(left(cwd)), prepare(e, trust=trust))[1]
    )
    assert main(["seed=5"]) == 0
    assert seen == [[]]
    assert len(notes.prepared) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment=clip_fx"],
        ["trian.epochs=3"],
        ["train.epochs=many"],
        ["hooks={x: {}}"],
        ["seed=2"],
        ["seed=${nowhere}"],
        ["hydra.run.dir=${nowhere}"],
        ["seed=1,2"],
        ["+hooks.x.select=h[-1]"],
        ["-m", "seed=5,x"],
        ["-m", "seed=5,6", "train.epochs=-1"],
        ["-m", "seed=5", "hydra.sweep.dir=${nowhere}"],
        ["--config-dir", "nowhere"],
        ["--config-name", "nothing"],
        ["--cfg", "job", "--info"],
        ["--resolve"],
        ["--no-such-flag"],
        ["--experimental-rerun", "config.pickle"],
        ["--cfg", "job", "--package", "nothing"],
        ["-sc", "query=no_shell"],
    ],
    ids=" ".join,
)
def test_a_refused_command_leaves_no_files_and_exits_with_2(arguments, cwd: Path, notes, capsys) -> None:
    assert main(arguments) == 2
    assert left(cwd) == []
    assert notes.ran == []
    printed = capsys.readouterr()
    assert printed.err and "Traceback" not in printed.err
    assert len(printed.err.splitlines()) < 30


@pytest.mark.parametrize(
    ("task", "flags"), [("plan", []), ("modules", ["-m"]), ("plan", ["hydra.mode=MULTIRUN"])], ids=str
)
def test_a_read_only_task_leaves_no_files(task: str, flags: list[str], cwd: Path, notes) -> None:
    assert main([*flags, "experiment=clip_fc", f"task={task}"]) == 0
    of = {"plan": "train", "modules": "modules"}  # a plan is that of the experiment's own task
    assert ([shown.settings.task.name for shown in notes.shown], notes.ran) == ([of[task]], [])
    assert left(cwd) == []


def test_a_read_only_task_ignores_that_the_directory_holds_a_run(cwd: Path, notes) -> None:
    assert main(["seed=5", "hydra.run.dir=mine"]) == 0
    assert main(["task=plan", "hydra.run.dir=mine"]) == 0


def test_a_directory_that_holds_a_run_is_refused_and_not_changed(cwd: Path, notes, capsys) -> None:
    assert main(["seed=5", "hydra.run.dir=mine"]) == 0
    assert main(["seed=6", "hydra.run.dir=mine"]) == 2
    assert f"hydra.run.dir: {cwd / 'mine'} already holds a run" in capsys.readouterr().err
    assert OmegaConf.load(cwd / "mine/.hydra/config.yaml").seed == 5


def test_a_directory_that_cannot_be_created_is_refused(cwd: Path, notes, capsys) -> None:
    (cwd / "file").touch()
    assert main(["seed=5", "hydra.run.dir=file/run"]) == 2
    assert "file/run: Not a directory" in capsys.readouterr().err


def test_a_configuration_may_refer_to_its_own_run_directory(cwd: Path, notes) -> None:
    assert main(["seed=5", "data.root=${hydra:runtime.output_dir}"]) == 0
    ((experiment, _),) = notes.prepared
    assert experiment.settings.data.root == str(only_run(cwd))


@pytest.mark.parametrize(("seed", "code"), [(5, 0), (1, 1), (2, 2), (3, 3), (4, 3), (130, 130)])
def test_the_exit_code_is_that_of_the_run(seed: int, code: int, notes) -> None:
    assert main([f"seed={seed}"]) == code


def test_the_flag_in_the_middle_still_sweeps(cwd: Path, notes) -> None:
    assert main(["experiment=clip_fc", "-m", "seed=5,6"]) == 0
    assert [seed for seed, _ in notes.ran] == [5, 6]


def test_the_run_flag_makes_a_single_run_of_an_experiment_with_a_sweep(conf: Conf, notes) -> None:
    folder = conf(**{"experiment/mine": "# @package _global_\nhydra: {mode: MULTIRUN}\nseed: 7\n"})
    assert main(["-r", "--config-dir", folder, "experiment=mine"]) == 0
    assert [run_dir.parent.name for _, run_dir in notes.ran] == ["outputs"]


class TestOwnFolders:
    """`--config-dir` and `hydra.searchpath`: the user's own experiments, without changes to hookrun."""

    def test_an_experiment_of_the_user(self, conf: Conf, notes) -> None:
        assert main(["--config-dir", conf(**{"experiment/mine": OWN}), "experiment=mine"]) == 0
        assert notes.ran[0][0] == 7

    def test_the_user_s_folder_comes_first(self, conf: Conf, notes) -> None:
        assert main(["--config-dir", conf(**{"experiment/clip_fc": OWN}), "experiment=clip_fc"]) == 0
        assert notes.ran[0][0] == 7

    def test_a_hook_set_of_the_user(self, conf: Conf, notes) -> None:
        folder = conf(**{"hooks/mine": "probe: {select: fc, hook: forward, action: capture}\n"})
        assert main(["--config-dir", folder, "hooks=mine", "seed=5"]) == 0
        ((experiment, _),) = notes.prepared
        assert [hook.name for hook in experiment.hooks.hooks] == ["probe"]

    def test_the_search_path(self, conf: Conf, notes) -> None:
        folder = conf(**{"experiment/mine": OWN})
        assert main([f"hydra.searchpath=[file://{folder}]", "experiment=mine"]) == 0
        assert notes.ran[0][0] == 7

    def test_a_root_configuration_of_the_user(self, conf: Conf, notes) -> None:
        folder = conf(mine="defaults: [config, _self_]\nseed: 7\n")
        assert main(["--config-dir", folder, "--config-name", "mine"]) == 0
        assert notes.ran[0][0] == 7

    def test_another_main_folder(self, conf: Conf, capsys) -> None:
        folder = conf(config="seed: 7\n")
        assert main(["--config-path", folder, "--cfg", "job"]) == 0
        assert capsys.readouterr().out == "seed: 7\n"


class TestTrust:
    """The person who runs a command may trust packages, the author of a file may not."""

    @pytest.mark.parametrize("typed", ["+trust=[mypkg,other.sub]", "++trust=[mypkg,other.sub]"])
    def test_typed_packages_are_trusted_and_not_stored(self, typed: str, cwd: Path, notes) -> None:
        assert main([typed, "seed=5"]) == 0
        ((_, trust),) = notes.prepared
        assert trust == {"mypkg", "other.sub"}
        assert "mypkg" not in "".join(file.read_text() for file in (only_run(cwd) / ".hydra").iterdir())

    def test_nothing_is_trusted_by_default(self, notes) -> None:
        main(["seed=5"])
        assert notes.prepared[0][1] == frozenset()

    @pytest.mark.parametrize(
        "body",
        [
            "trust: [mypkg]\n",
            "hydra: {mode: MULTIRUN, sweeper: {params: {+trust: mypkg}}}\n",
            "hydra: {overrides: {task: ['+trust=mypkg']}, mode: MULTIRUN}\n",
        ],
    )
    def test_a_file_cannot_trust(self, body: str, conf: Conf, cwd: Path, notes, capsys) -> None:
        folder = conf(**{"experiment/mine": "# @package _global_\n" + body})
        assert main(["--config-dir", folder, "experiment=mine"]) == 2
        assert "trust: is taken from the command line only, never from a file" in capsys.readouterr().err
        assert left(cwd) == []

    def test_every_job_of_a_sweep_trusts_the_typed_packages(self, notes) -> None:
        assert main(["-m", "+trust=mypkg", "seed=5,6"]) == 0
        assert [trust for _, trust in notes.prepared] == [{"mypkg"}, {"mypkg"}]


class TestReading:
    """Flags that only show something."""

    def test_cfg_job(self, capsys) -> None:
        assert main(["--cfg", "job", "experiment=clip_fc", "seed=5"]) == 0
        shown = OmegaConf.create(capsys.readouterr().out)
        assert (shown.seed, shown.hooks.clip_fc.action) == (5, "clamp")
        assert "hydra" not in shown

    def test_cfg_hydra_and_all(self, capsys) -> None:
        assert main(["--cfg", "hydra"]) == 0
        assert list(OmegaConf.create(capsys.readouterr().out)) == ["hydra"]
        assert main(["--cfg", "all"]) == 0
        assert {"hydra", "task", "model"} <= set(OmegaConf.create(capsys.readouterr().out))

    def test_package_and_resolve(self, capsys) -> None:
        assert (
            main(["--cfg", "job", "--package", "train", "--resolve", "train.epochs=${seed}", "seed=5"]) == 0
        )
        assert OmegaConf.create(capsys.readouterr().out).epochs == 5

    @pytest.mark.parametrize("what", ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"])
    def test_info(self, what: str, cwd: Path, capsys) -> None:
        assert main(["experiment=clip_fc", "--info", what]) == 0
        assert capsys.readouterr().out
        assert left(cwd) == []

    def test_version(self, capsys) -> None:
        assert main(["--version"]) == 0
        assert "Hydra" in capsys.readouterr().out

    def test_hydra_help(self, capsys) -> None:
        assert main(["--hydra-help"]) == 0
        assert "hydra/launcher" in capsys.readouterr().out


class TestCompletion:
    """Shell completion for the console script."""

    @pytest.fixture
    def complete(self, monkeypatch, capsys) -> Callable[[str], list[str]]:
        def query(line: str) -> list[str]:
            monkeypatch.setenv("COMP_LINE", line)
            assert main(["-sc", "query=bash"]) == 0
            return capsys.readouterr().out.split()

        return query

    def test_names_of_groups(self, complete) -> None:
        assert {"experiment=", "data=", "task="} <= set(complete("hookrun "))

    def test_options_of_a_group(self, complete) -> None:
        assert complete("hookrun task=pl") == ["task=plan"]

    def test_options_in_a_folder_of_a_group(self, complete) -> None:
        assert complete("hookrun experiment=tutorial/01") == ["experiment=tutorial/01_print_gradient"]

    def test_keys_of_the_chosen_experiment(self, complete) -> None:
        assert complete("hookrun experiment=clip_fc hooks.clip_fc.m") == [
            "hooks.clip_fc.max=",
            "hooks.clip_fc.min=",
        ]

    def test_a_folder_of_the_user(self, complete, conf: Conf) -> None:
        folder = conf(**{"experiment/mine": OWN})
        assert complete(f"hookrun --config-dir {folder} experiment=m") == ["experiment=mine"]

    def test_the_script_to_install_is_for_the_console_script(self, capsys) -> None:
        assert main(["-sc", "install=bash"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith("-F hydra_bash_completion hookrun")


def test_a_refused_job_is_not_recorded(cwd: Path, notes) -> None:
    assert main(["-m", "seed=5,6,7", "train.epochs=1,none"]) == 2
    assert (notes.ran, left(cwd)) == ([], [])


def test_the_status_of_a_run_that_is_done(cwd: Path, notes) -> None:
    main(["seed=5"])
    assert json.loads((only_run(cwd) / "status.json").read_text())["exit_code"] == 0
