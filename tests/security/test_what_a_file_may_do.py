"""Which keys of Hydra a file may set, which only the command line may, and what grants trust."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from hookrun.api import load_spec
from hookrun.cli import main
from hookrun.compose.hydra import conf_dir, opened
from hookrun.config.interpolations import RefusedInterpolation, guarded, resolved
from hookrun.errors import SpecError
from hookrun.trust import of_environment, read_once

GLOBAL = "# @package _global_\n"


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(folder: Path, **files: str) -> str:
    for name, text in files.items():
        file = folder / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return str(folder)


class TestFile:
    def test_it_may_ask_for_a_sweep(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        section = "hydra: {mode: MULTIRUN, job: {name: mine}, sweeper: {params: {seed: '1,2'}}}\n"
        text = f"{GLOBAL}defaults: [{{override /task: plan}}]\n{section}"
        folder = write(tmp_path / "conf", **{"experiment/mine": text})
        assert main(["--config-dir", folder, "experiment=mine"]) == 0
        assert "#0: seed=1" in capsys.readouterr().out

    def test_it_may_choose_an_installed_launcher_and_sweeper(self, tmp_path: Path) -> None:
        chosen = "{override /hydra/launcher: basic}, {override /hydra/sweeper: basic}, {override /task: plan}"
        section = "hydra: {mode: MULTIRUN, sweeper: {max_batch_size: 1, params: {seed: '1,2'}}}\n"
        text = f"{GLOBAL}defaults: [{chosen}]\n{section}"
        folder = write(tmp_path / "conf", **{"experiment/mine": text})
        assert main(["--config-dir", folder, "experiment=mine"]) == 0

    def test_it_may_build_on_an_installed_sweeper(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "conf", **{"hydra/sweeper/small": "defaults: [basic]\nmax_batch_size: 1\n"})
        assert main(["--config-dir", folder, "-m", "hydra/sweeper=small", "task=plan", "seed=1,2"]) == 0

    def test_it_may_use_interpolations(self, tmp_path: Path) -> None:
        file = Path(
            write(tmp_path, spec="a: {select: fc, hook: forward, action: clamp, min: 0, max: '${a.min}'}\n")
        )
        assert load_spec(file / "spec.yaml").hooks[0].action.model_dump()["max"] == 0

    def test_a_copy_of_hookrun_s_root_configuration_is_accepted(self, tmp_path: Path) -> None:
        folder = tmp_path / "conf"
        folder.mkdir()
        shutil.copy(conf_dir() / "config.yaml", folder)
        assert main(["--config-dir", str(folder), "task=plan"]) == 0

    def test_a_root_without_directories_gets_hookrun_s(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "conf", config="defaults: [task: train, model: cnn, _self_]\n")
        with opened(conf_dir(), Path(folder)) as app:
            raw = OmegaConf.to_container(app.compose_config("config", [], RunMode.RUN).hydra, resolve=False)
        assert isinstance(raw, dict)
        assert raw["run"]["dir"] == "outputs/${now:%Y-%m-%d_%H-%M-%S-%f}"

    def test_a_root_that_sets_a_directory_is_refused_with_advice(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write(tmp_path / "conf", config="defaults: [_self_]\nhydra: {run: {dir: /data/runs}}\n")
        assert main(["--config-dir", folder]) == 2
        printed = capsys.readouterr().err
        assert f"{folder}/config.yaml: hydra.run.dir: cannot be set in a file" in printed
        assert "type it, or set HOOKRUN_OUTPUT=DIR" in printed

    def test_a_link_that_leads_out_of_the_folder_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(tmp_path / "elsewhere", secret="hidden: s3cret\n")
        folder = write(tmp_path / "conf", **{"experiment/mine": f"{GLOBAL}defaults: [/model/a@model.args]\n"})
        (tmp_path / "conf/model").mkdir()
        (tmp_path / "conf/model/a.yaml").symlink_to(tmp_path / "elsewhere/secret.yaml")
        assert main(["--config-dir", folder, "experiment=mine"]) == 2
        printed = capsys.readouterr().err
        assert "is a link that leads out of the folder" in printed
        assert "s3cret" not in printed


class TestCommandLine:
    def test_it_may_set_directories(self, tmp_path: Path) -> None:
        assert (
            main(["hydra.run.dir=../mine", "train.epochs=1", "train.limit_batches=1", "compute.threads=1"])
            == 0
        )
        assert (tmp_path / "mine/plan.json").is_file()

    def test_it_may_choose_the_logging_and_the_environment_of_jobs(self, cwd: Path) -> None:
        typed = ["hydra/job_logging=default", "+hydra.job.env_set.HOOKRUN_SEEN=1", "train.epochs=0"]
        assert main([*typed, "hydra.run.dir=run"]) == 0
        assert "HOOKRUN_SEEN" not in os.environ

    def test_it_may_not_copy_the_environment(self, cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["hydra.job.env_copy=[PATH]"]) == 2
        assert "hydra.job.env_copy: would copy values of the environment" in capsys.readouterr().err
        assert not list(cwd.iterdir())

    @pytest.mark.parametrize(
        "typed", ["hydra.run.dir=${oc.env:HOME}", "hydra.job.name=${oc.env:HOME}", "seed=${oc.env:HOME}"]
    )
    def test_it_may_not_read_the_environment(
        self, typed: str, cwd: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = main([typed, "hydra.run.dir=${hydra.job.name}"] if "name" in typed else [typed])
        assert code == 2
        assert "no value of the environment enters a configuration" in capsys.readouterr().err
        assert not list(cwd.iterdir())

    def test_a_value_of_a_file_does_not_lead_a_job_out_of_the_sweep(
        self, tmp_path: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        section = "hydra: {mode: MULTIRUN, sweeper: {params: {model.weights: '../../../elsewhere'}}}\n"
        folder = write(tmp_path / "conf", **{"experiment/mine": GLOBAL + section})
        typed = "hydra.sweep.subdir=${hydra.job.override_dirname}"
        assert main(["--config-dir", folder, "experiment=mine", typed]) == 2
        assert "outside the directory of the sweep" in capsys.readouterr().err
        assert not (tmp_path / "elsewhere").exists()


class TestOutput:
    """HOOKRUN_OUTPUT names the folder of all outputs."""

    def test_runs_and_sweeps_are_written_there(
        self, tmp_path: Path, cwd: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOOKRUN_OUTPUT", str(tmp_path / "all my runs"))
        quick = ["train.epochs=1", "train.limit_batches=1", "data.batch_size=512"]
        assert main(quick) == 0
        assert main(["-m", *quick, "seed=1"]) == 0
        assert not list(cwd.iterdir())
        assert len(list((tmp_path / "all my runs").glob("outputs/2*/plan.json"))) == 1
        assert len(list((tmp_path / "all my runs").glob("multirun/2*/0/plan.json"))) == 1

    def test_a_typed_directory_comes_first(
        self, tmp_path: Path, cwd: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOOKRUN_OUTPUT", str(tmp_path / "all"))
        assert main(["hydra.run.dir=mine", "train.epochs=1", "train.limit_batches=1"]) == 0
        assert (cwd / "mine/plan.json").is_file()

    def test_a_folder_that_a_configuration_cannot_name_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("HOOKRUN_OUTPUT", "${oc.env:HOME}")
        assert main(["task=plan"]) == 2
        assert "HOOKRUN_OUTPUT: found" in capsys.readouterr().err


class TestTrust:
    def test_it_is_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOOKRUN_TRUST", "first, second")
        with read_once():
            monkeypatch.setenv("HOOKRUN_TRUST", "late")
            assert of_environment() == {"first", "second"}
            with read_once(frozenset({"job"})):
                assert of_environment() == {"job"}
        assert of_environment() == {"late"}

    def test_the_environment_of_a_job_grants_none(
        self, cwd: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Not even if it was typed: trust is given as +trust=[...], where it can be seen."""
        typed = [
            "-m",
            "seed=1",
            "task=predict",
            "model=python",
            "model.factory=subprocess:getoutput",
            "+model.args.cmd='touch PWNED'",
        ]
        assert main([*typed, "+hydra.job.env_set.HOOKRUN_TRUST=subprocess"]) == 2
        assert "the package 'subprocess' is not trusted" in capsys.readouterr().err
        assert not list(cwd.rglob("PWNED"))


class TestResolvers:
    @pytest.fixture
    def evaluate(self) -> Iterator[None]:
        OmegaConf.register_new_resolver("evaluate", lambda text: eval(text))
        yield
        OmegaConf.clear_resolver("evaluate")

    @pytest.mark.usefixtures("evaluate")
    def test_an_application_s_resolver_is_refused_in_a_spec(self, tmp_path: Path) -> None:
        file = Path(write(tmp_path, spec="a: '${evaluate:\"open(chr(80),chr(119))\"}'\n")) / "spec.yaml"
        with pytest.raises(SpecError, match="the resolver 'evaluate' is not available"):
            load_spec(file)
        assert not Path("P").exists()

    @pytest.mark.usefixtures("evaluate")
    def test_the_application_keeps_its_resolvers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CANARY", "mine")
        own = OmegaConf.create({"a": "${evaluate:'1+1'}", "b": "${oc.env:CANARY}"})
        before = BaseContainer._resolvers["oc.env"]
        with guarded(), ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: (own.a, own.b)).result() == (2, "mine")
        assert (own.a, own.b) == (2, "mine")
        assert BaseContainer._resolvers["oc.env"] is before
        assert type(BaseContainer._resolvers) is dict

    @pytest.mark.parametrize("count", [10, 30])
    def test_names_made_of_other_interpolations_do_not_multiply(self, count: int) -> None:
        texts = {f"a{n}": f"${{x.${{below.n{n}}}}}" * 2 for n in range(1, count)}
        below = {f"n{n}": f"a{n - 1}" for n in range(1, count)}
        config = OmegaConf.create({"x": {"a0": "text", **texts}, "below": below})
        with pytest.raises(RefusedInterpolation, match="resolves more than"):
            resolved(config)


class TestPlugin:
    """A launcher or sweeper file with `_target_`."""

    BASIC = (
        "_target_: hydra._internal.core_plugins.basic_sweeper.BasicSweeper\nmax_batch_size: 1\nparams: null\n"
    )

    def test_an_installed_class_may_be_chosen_on_the_command_line(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "conf", **{"hydra/sweeper/mine": self.BASIC})
        assert main(["--config-dir", folder, "-m", "hydra/sweeper=mine", "task=plan", "seed=1,2"]) == 0

    @pytest.mark.parametrize(
        "target", ["subprocess.getoutput", "hydra.utils.get_class", "logging.FileHandler"]
    )
    def test_any_other_class_is_refused_there_too(
        self, target: str, tmp_path: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write(tmp_path / "conf", **{"hydra/sweeper/mine": f"_target_: {target}\n"})
        assert main(["--config-dir", folder, "-m", "hydra/sweeper=mine", "seed=1,2"]) == 2
        assert "hydra.sweeper._target_: cannot be set in a file" in capsys.readouterr().err
        assert not list(cwd.iterdir())

    def test_a_file_does_not_choose_it(self, tmp_path: Path, cwd: Path) -> None:
        chosen = f"{GLOBAL}defaults: [{{override /hydra/sweeper: mine}}]\nhydra: {{mode: MULTIRUN}}\n"
        folder = write(tmp_path / "conf", **{"hydra/sweeper/mine": self.BASIC, "experiment/mine": chosen})
        assert main(["--config-dir", folder, "experiment=mine"]) == 2
        assert not list(cwd.iterdir())
