"""A stranger's config files: each tries one side effect through Hydra, and has none.

Every input runs in process. Afterwards no file was made by its code, no file outside `outputs/` and `multirun/` was
made or changed, the environment is as before, and the secret of the environment is in no file, no name and no output.
"""

# ruff: noqa: E501  # a table: one input a line
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hookrun.cli import main

SECRET = "s3cret-c4nary"
GLOBAL = "# @package _global_\n"
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
    "a target by merge": {"experiment/mine": f"{GLOBAL}x: &x {TOUCH}\nmodel: {{name: mlp, args: {{<<: *x}}}}\n"},
    "a python tag": {"experiment/mine": f"{GLOBAL}seed: !!python/object/apply:os.system ['touch PWNED']\n"},
    "a python name": {"experiment/mine": f"{GLOBAL}seed: !!python/name:os.system\n"},
    "a custom search of the sweeper": own("{mode: MULTIRUN, sweeper: {custom_search_space: evil.touch}}"),
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
UNREAD = {
    # Hydra's own folder comes before all others: a file of the same name is never read
    "an output group of an installed name": {"hydra/output/default": "run: {dir: ../elsewhere}\n", "experiment/mine": GLOBAL + QUICK},
}  # fmt: skip


@dataclass
class Place:
    """Where an input is tried: `cwd`, with a folder of configurations and a victim beside it."""

    path: Path

    def write(self, files: dict[str, str]) -> str:
        folder = self.path / "conf"
        for name, text in files.items():
            file = folder / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("OUTSIDE", str(self.path / "outside")), encoding="utf-8")
        return str(folder)

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
    (tmp_path / "cwd").mkdir()
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
    monkeypatch.chdir(tmp_path / "cwd")
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


@pytest.mark.parametrize("name", UNREAD)
def test_a_file_named_like_hydras_own_is_never_read(name: str, place: Place) -> None:
    folder = place.write(UNREAD[name])
    before = place.state()
    assert main(["--config-dir", folder, "experiment=mine", "task=plan"]) == 0
    assert place.state() == before
