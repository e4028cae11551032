"""Which keys of Hydra a file may set; a stranger's files each try one side effect, and have none.

Every input runs in process. Afterwards no file was made by its code, no file outside `outputs/` and `multirun/` was
made or changed, the environment is as before, and the secret of the environment is in no file, no name and no output.
"""

# ruff: noqa: E501  # a table: one input a line
from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from hookrun.api import load_spec
from hookrun.cli import main
from hookrun.command.compose.hydra import conf_dir, opened
from hookrun.errors import SpecError
from hookrun.store.config.interpolations import RefusedInterpolation, guarded, resolved, unguarded

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


BASICS = f"""{GLOBAL}
defaults: [{{override /hydra/launcher: basic}}, {{override /hydra/sweeper: basic}}, {{override /task: plan}}]
hydra: {{mode: MULTIRUN, sweeper: {{max_batch_size: 1, params: {{seed: '1,2'}}}}}}
"""
BASIC = "_target_: hydra._internal.core_plugins.basic_sweeper.BasicSweeper\nmax_batch_size: 1\nparams: null\n"
PLANS = ("task=plan", "seed=1,2")


class TestFile:
    def test_it_may_ask_for_a_sweep(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        section = "hydra: {mode: MULTIRUN, job: {name: mine}, sweeper: {params: {seed: '1,2'}}}\n"
        text = f"{GLOBAL}defaults: [{{override /task: plan}}]\n{section}"
        folder = write(tmp_path / "conf", **{"experiment/mine": text})
        assert main(["--config-dir", folder, "experiment=mine"]) == 0
        assert "#0: seed=1" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("files", "typed"),
        [
            ({"experiment/mine": BASICS}, ["experiment=mine"]),
            (
                {"hydra/sweeper/small": "defaults: [basic]\nmax_batch_size: 1\n"},
                ["-m", "hydra/sweeper=small", *PLANS],
            ),
            ({"hydra/sweeper/mine": BASIC}, ["-m", "hydra/sweeper=mine", *PLANS]),
        ],
        ids=[
            "chosen in a file",
            "built on in a file",
            "an installed class that is chosen on the command line",
        ],
    )
    def test_it_may_have_an_installed_sweeper(self, files, typed: list[str], tmp_path: Path) -> None:
        assert main(["--config-dir", write(tmp_path / "conf", **files), *typed]) == 0

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
    def test_it_may_choose_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOOKRUN_OUTPUT", str(tmp_path / "all"))
        typed = ["hydra/job_logging=default", "+hydra.job.env_set.HOOKRUN_SEEN=1", "train.epochs=0"]
        assert main([*typed, "hydra.run.dir=../mine"]) == 0
        assert "HOOKRUN_SEEN" not in os.environ
        assert (tmp_path / "mine/hookrun.log").is_file(), "the log of Hydra that was chosen"
        assert (tmp_path / "mine/plan.json").is_file()
        assert not (tmp_path / "all").exists()

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

    def test_sweeps_are_written_there(
        self, tmp_path: Path, cwd: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOOKRUN_OUTPUT", str(tmp_path / "all my runs"))
        quick = ["train.epochs=1", "train.limit_batches=1", "data.batch_size=512"]
        assert main(quick) == 0
        assert main(["-m", *quick, "seed=1"]) == 0
        assert not list(cwd.iterdir())
        assert len(list((tmp_path / "all my runs").glob("outputs/2*/plan.json"))) == 1
        assert len(list((tmp_path / "all my runs").glob("multirun/2*/0/plan.json"))) == 1

    def test_a_folder_that_a_configuration_cannot_name_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("HOOKRUN_OUTPUT", "${oc.env:HOME}")
        assert main(["task=plan"]) == 2
        assert "HOOKRUN_OUTPUT: found" in capsys.readouterr().err


class TestTrust:
    def test_the_environment_of_a_job_grants_none(
        self, cwd: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Not even if it was typed: trust is given as +trust=[...], where it can be seen."""
        typed = [
            "-m", "seed=1", "task=predict", "model=python", "model.factory=subprocess:getoutput",
            "+model.args.cmd='touch PWNED'",
        ]  # fmt: skip
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
        with guarded(), unguarded():
            assert own.a == 2
            assert own.b == "mine"
        assert own.a == 2
        assert own.b == "mine"
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
        folder = write(tmp_path / "conf", **{"hydra/sweeper/mine": BASIC, "experiment/mine": chosen})
        assert main(["--config-dir", folder, "experiment=mine"]) == 2
        assert not list(cwd.iterdir())


SECRET = "s3cret-c4nary"
QUICK = "data: {batch_size: 512}\ntrain: {epochs: 1, limit_batches: 1}\n"
SHELL = "defaults: [{override /task: predict}, {override /model: python}]\n"
SHELL += "model: {factory: 'subprocess:getoutput', args: {cmd: 'touch PWNED'}}\n"
TOUCH = "{_target_: subprocess.getoutput, cmd: 'touch PWNED'}"
CALLBACK = "{_target_: hydra_touch.Callback}"
FACTORY = "{version: 1, handlers: {h: {(): subprocess.getoutput, cmd: 'touch PWNED'}}, root: {handlers: [h]}}"
TRUNCATE = "{version: 1, handlers: {h: {class: logging.FileHandler, filename: ../victim, mode: w}}, root: {handlers: [h]}}"
GRANT = "{HOOKRUN_TRUST: subprocess}"


def own(hydra: str, rest: str = QUICK) -> dict[str, str]:
    """An experiment with this section `hydra`."""
    return {"experiment/mine": f"{GLOBAL}{rest}hydra: {hydra}\n"}


def params(key: str, value: str = "1,2", rest: str = QUICK) -> dict[str, str]:
    return own(f"{{mode: MULTIRUN, sweeper: {{params: {{{key!r}: {value!r}}}}}}}", rest)


def group(name: str, text: str, choose: str = "") -> dict[str, str]:
    """A file in a config group of Hydra, and an experiment that chooses it."""
    where, _, choice = name.rpartition("/")
    item = choose or f"override /{where}: {choice}"
    return {
        name: text,
        "experiment/mine": f"{GLOBAL}defaults: [{{{item}}}]\n{QUICK}hydra: {{mode: MULTIRUN}}\n",
    }


def listed(item: str, **files: str) -> dict[str, str]:
    """An experiment with this item in its defaults list."""
    return {"experiment/mine": f"{GLOBAL}defaults: [{item}]\n{QUICK}", **files}


def root(text: str) -> dict[str, str]:
    """A config.yaml that replaces hookrun's own."""
    return {"config": f"defaults: [task: train, model: mlp, data: digits, train: default, _self_]\n{text}\n"}


ACTING = {
    # trust that a file grants itself
    "the environment of jobs": own(f"{{mode: MULTIRUN, sweeper: {{params: {{seed: '0'}}}}, job: {{env_set: {GRANT}}}}}", SHELL),
    "the environment of a run": own(f"{{job: {{env_set: {GRANT}}}}}", SHELL),
    "the environment by a param": params("+hydra.job.env_set.HOOKRUN_TRUST", "subprocess", SHELL),
    "a whole mapping by a param": params("hydra.job.env_set", "{HOOKRUN_TRUST: subprocess}", SHELL),
    "trust by a param": params("+trust", "[subprocess]", SHELL),
    "trust by a forced param": params("++trust", "subprocess", SHELL),
    "trust by a key": {"experiment/mine": f"{GLOBAL}{SHELL}trust: [subprocess]\n"},
    "no trust at all": {"experiment/mine": GLOBAL + SHELL},
    "overrides as if typed": own("{overrides: {task: ['+trust=[subprocess]']}}", SHELL),
    "overrides of Hydra as if typed": own(f"{{overrides: {{hydra: ['hydra.job.env_set={GRANT}']}}, mode: MULTIRUN}}", SHELL),
    "the environment by a package": {
        "experiment/mine": f"{GLOBAL}defaults: [{{/evil@hydra.job: a}}, {{override /model: python}}]\n{QUICK}",
        "evil/a": f"env_set: {GRANT}\n",
    },
    "the environment by a header": listed("/evil/a", **{"evil/a": f"# @package hydra.job\nenv_set: {GRANT}\n"}),
    "by a header with brackets": listed("/evil/a", **{"evil/a": f"# @package hydra[job]\nenv_set: {GRANT}\n"}),
    "by a group's own package": listed("/hydra/job/a", **{"hydra/job/a": f"env_set: {GRANT}\n"}),
    # code
    "a callback": own(f"{{callbacks: {{c: {TOUCH}}}}}"),
    "a callback of a class": own(f"{{callbacks: {{c: {CALLBACK}}}}}"),
    "a callback by interpolation": own("{callbacks: {c: '${evil}'}}", f"{QUICK}evil: {CALLBACK}\n"),
    "a whole section by interpolation": own("${evil}", f"{QUICK}evil: {{callbacks: {{c: {CALLBACK}}}}}\n"),
    "a callback in a file": group("hydra/callbacks/evil", f"c: {CALLBACK}\n"),
    "a callback by an item": listed("/hydra/callbacks/evil", **{"hydra/callbacks/evil": f"c: {CALLBACK}\n"}),
    "a callback by a package": listed("/evil/a@hydra.callbacks", **{"evil/a": f"c: {CALLBACK}\n"}),
    "a logging factory": own(f"{{job_logging: {FACTORY}}}"),
    "a logging factory of Hydra's": own(f"{{hydra_logging: {FACTORY}}}"),
    "a logging factory in a file": group("hydra/job_logging/evil", FACTORY),
    "a sweeper": own(f"{{mode: MULTIRUN, sweeper: {TOUCH}}}"),
    "a launcher": own(f"{{mode: MULTIRUN, launcher: {TOUCH}}}"),
    "a nested launcher": own(f"{{mode: MULTIRUN, launcher: {{x: {TOUCH}}}}}"),
    "a launcher file": group("hydra/launcher/evil", f"_target_: hydra._internal.core_plugins.basic_launcher.BasicLauncher\nx: {TOUCH}\n"),
    "a launcher file that nests": group("hydra/launcher/evil", f"defaults: [basic]\nx: {TOUCH}\n"),
    "a sweeper file": group("hydra/sweeper/evil", f"_target_: hydra._internal.core_plugins.basic_sweeper.BasicSweeper\nmax_batch_size: {TOUCH}\n"),
    "a launcher of an installed name": group("hydra/launcher/basic", f"x: {TOUCH}\n"),
    "a sweeper of an installed name": group("hydra/sweeper/basic", "max_batch_size: 1\n"),
    "a help group of an installed name": {"hydra/help/hookrun": f"x: {TOUCH}\n", "experiment/mine": GLOBAL + QUICK},
    "a target in the model": {"experiment/mine": f"{GLOBAL}{QUICK}hooks: {{a: {TOUCH}}}\n"},
    "a target in arguments": {"experiment/mine": f"{GLOBAL}model: {{name: mlp, args: {TOUCH}}}\n"},
    "a target in a list": {"experiment/mine": f"{GLOBAL}model: {{name: mlp, args: {{a: [{TOUCH}]}}}}\n"},
    "a target by merge": {"experiment/mine": f"{GLOBAL}x: &x {TOUCH}\nmodel: {{name: mlp, args: {{<<: *x}}}}\n"},
    "a python tag": {"experiment/mine": f"{GLOBAL}seed: !!python/object/apply:os.system ['touch PWNED']\n"},
    "a python name": {"experiment/mine": f"{GLOBAL}seed: !!python/name:os.system\n"},
    "a custom search of the sweeper": own("{mode: MULTIRUN, sweeper: {custom_search_space: evil.touch}}"),
    "too many processes of a launcher": own("{mode: MULTIRUN, launcher: {n_jobs: 1000000000}}"),
    "a setup of a launcher": own("{mode: MULTIRUN, launcher: {setup: ['touch PWNED']}}"),
    "a python of a launcher": own("{mode: MULTIRUN, launcher: {python: 'touch PWNED'}}"),
    "a batch script by a newline": own('{mode: MULTIRUN, launcher: {partition: "a\\ntouch PWNED"}}'),
    "additional parameters of a launcher": own("{mode: MULTIRUN, launcher: {additional_parameters: {wrap: 'touch PWNED'}}}"),
    "an expression of a launcher": own("{mode: MULTIRUN, launcher: {pre_dispatch: '__import__(\"os\").system(\"touch PWNED\")'}}"),
    "Hydra's own root": {"hydra/config": f"callbacks: {{c: {CALLBACK}}}\n", "experiment/mine": GLOBAL + QUICK},
    # the search path
    "a search path in a package": own("{searchpath: ['pkg://evil_package']}"),
    "a search path of the root": {**root("hydra: {searchpath: ['pkg://evil_package']}")},
    "a search path elsewhere": {**root("hydra: {searchpath: ['file://OUTSIDE']}")},
    "a search path by interpolation": {**root("evil: {searchpath: ['pkg://evil_package']}\nhydra: ${evil}")},
    "a search path by a param": params("hydra.searchpath", "[pkg://evil_package]"),
    "out of the folder by an item": listed("/../outside/secret@model.args"),
    "out of the folder by a root": listed("//OUTSIDE/secret@model.args"),
    "out of the folder by a choice": {"experiment/mine": f"{GLOBAL}defaults: [{{override /model: ../../outside/secret}}]\n"},
    "out of the folder by a param": params("model", "../../outside/secret,mlp"),
    # directories and files
    "the directory of a run": own("{run: {dir: ../elsewhere}}"),
    "the absolute directory of a run": own("{run: {dir: OUTSIDE/elsewhere}}"),
    "the directory of a sweep": own("{mode: MULTIRUN, sweep: {dir: ../elsewhere}}"),
    "the subdirectory of a job": own("{mode: MULTIRUN, sweep: {subdir: ../../../elsewhere}}"),
    "the subdirectory of outputs": own("{output_subdir: ../../../elsewhere}"),
    "a directory by a param": params("hydra.sweep.dir", "../elsewhere"),
    "a job's directory by a param": params("hydra.sweep.subdir", "../../../elsewhere"),
    "a directory by a forced param": params("++hydra.run.dir", "../elsewhere"),
    "outputs by a param": params("hydra.output_subdir", "../../../elsewhere"),
    "a deleted key of Hydra": params("~hydra.sweep.subdir", ""),
    "a directory by a root": root("hydra: {run: {dir: ../elsewhere}}"),
    "a directory by a package": listed("/evil/a@hydra.run", **{"evil/a": "dir: ../elsewhere\n"}),
    "a directory by a name": own("{job: {name: ../../elsewhere}}"),
    "a directory by the working directory": own("{job: {chdir: true}, run: {dir: ../elsewhere}}"),
    "a truncating handler": own(f"{{job_logging: {TRUNCATE}}}"),
    "a truncating handler of Hydra's": own(f"{{hydra_logging: {TRUNCATE}}}"),
    "a truncating handler in a file": group("hydra/job_logging/evil", TRUNCATE),
    "a handler by a package": listed("/evil/a@hydra.job_logging", **{"evil/a": TRUNCATE}),
    "a log that Hydra brings": {"experiment/mine": f"{GLOBAL}defaults: [{{override /hydra/job_logging: default}}]\n{QUICK}"},
    "a log by a relative name": group("hydra/launcher/evil", "defaults: [../job_logging/default]\n"),
    "a log for another package": listed("{/hydra/job_logging@hydra.hydra_logging: default}"),
    "a launcher in another place": listed("/hydra/launcher/basic@hydra.callbacks.c"),
    "Hydra's root in another place": listed("/hydra/config@hydra.callbacks"),
    "a folder of a launcher": own("{mode: MULTIRUN, launcher: {submitit_folder: ../elsewhere}}"),
    "a storage of a sweeper": own("{mode: MULTIRUN, sweeper: {storage: 'sqlite:///../elsewhere.db'}}"),
    "a temporary folder of a launcher": own("{mode: MULTIRUN, launcher: {temp_folder: ../elsewhere}}"),
    "a help text": own("{help: {template: '${oc.env:CANARY}'}}"),
    "a help text of Hydra's": own("{hydra_help: {template: x}}"),
    "loud logging": own("{verbose: true}"),
    "facts of the runtime": own("{runtime: {cwd: /}}"),
    "a dirname": own("{job: {config: {override_dirname: {kv_sep: '/../'}}}}"),
    # params
    "quoted": params("'hydra.run.dir'", "../elsewhere"),
    "with a space": params(" hydra.run.dir", "../elsewhere"),
    "with a value in the key": params("seed=1,hydra.run.dir", "../elsewhere"),
    "with a line in the key": params("seed=1\nhydra.run.dir", "../elsewhere"),
    "a group of Hydra": params("hydra/launcher", "evil"),
    "an added group of Hydra": params("+hydra/callbacks", "evil"),
    "a group in a package": params("model@hydra.launcher", "mlp"),
    "brackets": params("hydra[run][dir]", "../elsewhere"),
    "resume": params("+resume", "../victim"),
    "resume anyway": params("++resume_anyway", "true"),
    "fail fast": params("fail_fast", "true"),
    "no key": params("", "a"),
    "nothing but a sign": params("+", "a"),
    "a mapping of params": own("{mode: MULTIRUN, sweeper: {params: {hydra: {run: {dir: ../elsewhere}}}}}"),
    "a list of params": own("{mode: MULTIRUN, sweeper: {params: [hydra.run.dir=../elsewhere]}}"),
    "a number as a param": own("{mode: MULTIRUN, sweeper: {params: {1: a}}}"),
    "too many jobs": params("seed", "range(1000000000)"),
    "a long text of params": params("seed", "1," * 3_000),
    "params nested in a text": params("model.args.x", "[" * 1_000 + "]" * 1_000),
    "defaults that multiply": {
        "experiment/mine": f"{GLOBAL}defaults: [/a/l0]\n{QUICK}",
        **{f"a/l{n}": f"defaults: [/a/l{n + 1}@x, /a/l{n + 1}@y]\n" for n in range(30)},
        "a/l30": "a: 1\n",
    },
    "defaults in a circle": {"experiment/mine": f"{GLOBAL}defaults: [/experiment/other]\n", "experiment/other": "defaults: [/experiment/mine]\n"},
    "too many jobs in all": own("{mode: MULTIRUN, sweeper: {params: {seed: 'range(9999)', train.epochs: 'range(9999)'}}}"),
    # the environment
    "a variable": {"experiment/mine": f"{GLOBAL}{QUICK}task: {{name: train, capture: '${{oc.env:CANARY}}'}}\n"},
    "a variable by a computed name": {
        "experiment/mine": f"{GLOBAL}{QUICK}task: {{name: train, run: env}}\nmodel: {{weights: '${{oc.${{task.run}}:CANARY}}'}}\n"
    },
    "a variable with a default": {"experiment/mine": f"{GLOBAL}{QUICK}strict: ${{oc.env:NOT_THERE,false}}\n"},
    "a decoded variable": {"experiment/mine": f"{GLOBAL}train: {{epochs: 1, limit_batches: 1, loss: '${{oc.decode:\"${{oc.env:CANARY}}\"}}'}}\n"},
    "a text decoded to a variable": {
        "experiment/mine": f"{GLOBAL}{QUICK}task: {{name: train, run: '\\${{oc.env:CANARY}}'}}\nmodel: {{weights: '${{oc.decode:${{task.run}}}}'}}\n"
    },
    "a created variable": {"experiment/mine": f"{GLOBAL}train: {{epochs: 1, limit_batches: 1, loss: '${{oc.create:${{oc.env:CANARY}}}}'}}\n"},
    "a variable in a choice": {"experiment/mine": f"{GLOBAL}defaults: [{{override /model: '${{oc.env:CANARY}}'}}]\n"},
    "a variable in the name of a job": own("{job: {name: '${oc.env:CANARY}'}}"),
    "a variable in a directory": own("{run: {dir: 'outputs/${oc.env:CANARY}'}}"),
    "a copied variable": own("{job: {env_copy: [CANARY]}}"),
    "a copied variable in a sweep": own("{mode: MULTIRUN, job: {env_copy: [CANARY]}}"),
    "a variable in a param": params("seed", "${oc.env:CANARY},1"),
    "a variable in a swept text": params("train.loss", "'${oc.env:CANARY}',mse"),
    "an old name of the resolver": {"experiment/mine": f"{GLOBAL}train: {{epochs: 1, limit_batches: 1, loss: '${{env:CANARY}}'}}\n"},
    "a resolver of the application": {"experiment/mine": f"{GLOBAL}train: {{epochs: 1, limit_batches: 1, loss: '${{evaluate:1+1}}'}}\n"},
    "the environment of a job": {"experiment/mine": f"{GLOBAL}train: {{epochs: 1, limit_batches: 1, loss: '${{hydra:job.env_set.CANARY}}'}}\n"},
}  # fmt: skip


@dataclass
class Place:
    """Where an input is tried: `cwd`, with a folder of configurations and a victim beside it."""

    path: Path

    def write(self, files: dict[str, str]) -> str:
        outside = str(self.path / "outside")
        return write(
            self.path / "conf", **{name: text.replace("OUTSIDE", outside) for name, text in files.items()}
        )

    def state(self) -> dict[str, bytes]:
        """Every file and folder except those of outputs."""
        return {
            str(path.relative_to(self.path)): path.read_bytes() if path.is_file() else b""
            for path in sorted(self.path.rglob("*"))
            if not {"outputs", "multirun", "__pycache__"} & set(path.relative_to(self.path).parts)
        }

    def written(self) -> str:
        """All names and contents below the working directory."""
        found = sorted((self.path / "cwd").rglob("*"))
        return "".join(
            f"{path}\n{path.read_text(errors='replace') if path.is_file() else ''}" for path in found
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.yaml").write_text(f"hidden: {SECRET}\n")
    (tmp_path / "victim").write_text("precious")
    package = tmp_path / "evil_package"
    package.mkdir()
    (package / "__init__.py").write_text("open('PWNED', 'w').close()\n")
    touch = "from hydra.experimental.callback import Callback as Base\nclass Callback(Base):\n"
    touch += "    def __init__(self):\n        open('PWNED', 'w').close()\n"
    (tmp_path / "hydra_touch.py").write_text(touch)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CANARY", SECRET)
    monkeypatch.delenv("HOOKRUN_TRUST", raising=False)
    yield Place(tmp_path)
    for name in ("evil_package", "hydra_touch"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ACTING)
def test_it_is_refused_without_a_side_effect(
    name: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ACTING[name]
    folder = place.write(files)
    before = place.state()
    code = main(["--config-dir", folder, *(["experiment=mine"] if "experiment/mine" in files else [])])
    printed = "".join(capsys.readouterr())
    assert place.state() == before
    assert "HOOKRUN_TRUST" not in os.environ
    assert SECRET not in place.written() + printed
    assert code == 2, printed
    assert "Traceback" not in printed
    assert not list((place.path / "cwd").iterdir())


def test_a_file_named_like_hydras_own_is_never_read(place: Place) -> None:
    """Hydra's own folder comes before all others."""
    files = {"hydra/output/default": "run: {dir: ../elsewhere}\n", "experiment/mine": GLOBAL + QUICK}
    folder = place.write(files)
    before = place.state()
    assert main(["--config-dir", folder, "experiment=mine", "task=plan"]) == 0
    assert place.state() == before
