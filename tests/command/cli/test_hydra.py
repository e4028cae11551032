"""The bridge to Hydra: its state, what it composes, and what a config file may set in its section."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import re

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.types import RunMode
from omegaconf import OmegaConf

from hookrun.cli import main
from hookrun.command.compose.compose import compose_dict
from hookrun.command.compose.hydra import conf_dir, opened
from hookrun.command.compose.hydra_section import (
    TRUST,
    acting_keys,
    wrong_choices,
    wrong_params,
    wrong_settings,
)
from hookrun.command.compose.loader import MAX_LOADS
from hookrun.errors import SpecError
from hookrun.run.tasks import parse_experiment
from hookrun.store.config.interpolations import guarded


def test_the_main_config_folder_is_searched_last(tmp_path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with opened(conf_dir(), first, second) as app:
        assert app.folders() == [first, second, conf_dir()]


@pytest.mark.parametrize("sweep", [False, True])
def test_a_full_disk_is_told_with_its_folder(cwd, monkeypatch, capsys, notes, sweep: bool) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hydra.core.utils._save_config", full)
    typed = ["-m", "seed=5,6", "hydra.sweep.dir=mine"] if sweep else ["seed=5", "hydra.run.dir=mine"]
    assert main(typed) == 1
    said = "cannot write Hydra's files in mine: No space left on device"
    assert said in capsys.readouterr().err


def test_a_checked_configuration_is_not_composed_again(tmp_path) -> None:
    """The value of `${now:…}` was resolved by the check; a second composition would give another time."""
    seen = []
    with opened(conf_dir()) as app:
        cfg = app.compose_config("config", ["hydra.mode=RUN", "model.weights=${now:%f}"], RunMode.RUN)
        cfg.hydra.run.dir = str(tmp_path / "run")
        checked = cfg.model.weights
        app.run_checked(cfg, lambda job: seen.append(job.model.weights))
    assert seen == [checked]
    assert (tmp_path / "run/.hydra/config.yaml").is_file()


@pytest.mark.parametrize(
    "job",
    [
        ["seed=1"],
        ["seed=2", "model=mlp", "+vars.x=3", "experiment=clip_fc", "++train.epochs=3"],
        ["experiment=clip_fc", "hooks=none", "+hooks.x={select: fc, hook: forward, action: print}"],
        ["train={epochs: 4}", "~experiment", "hydra.sweep.subdir='${hydra.job.num}'"],
    ],
    ids=" ".join,
)
def test_sharing_a_composition_does_not_change_a_job(job: list[str]) -> None:
    with opened(conf_dir()) as app, guarded():
        cfg = app.compose_config("config", ["hydra.job.name=mine", "seed=1,2"], RunMode.MULTIRUN)
        for other in (["experiment=clip_fc", "hooks=none"], ["model=mlp", "experiment=clip_fc"], job):
            app.job_config(cfg, other, 0)
        found = app.config_loader.load_sweep_config(cfg, job)
        expected = app.compose_config("config", ["hydra.job.name=mine", *job], RunMode.RUN)
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
    assert OmegaConf.is_struct(found)
    assert OmegaConf.is_struct(found.train)


def test_the_state_is_sent_to_the_processes_of_a_launcher(monkeypatch) -> None:
    """As launchers do it: copied in one process, and set in another one that has loaded Hydra's plugins."""
    monkeypatch.setattr(Singleton, "_instances", copy.copy(Singleton._instances))
    with opened(conf_dir()) as app:
        cfg = app.compose_config("config", ["hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        loader = pickle.loads(pickle.dumps(app.config_loader))
        Singleton.set_state(Singleton.get_state())
        assert loader.load_sweep_config(cfg, ["seed=7"]).seed == 7
        plugins = Plugins.instance()
    monkeypatch.undo()
    # Hydra has made the classes of its plugins again, and the earlier ones no longer work.
    Singleton._instances[Plugins] = plugins


def test_a_folder_with_a_link_to_itself_is_listed(tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/one.yaml").write_text("a: 1\n")
    (tmp_path / "round").symlink_to(".")
    with opened(conf_dir(), tmp_path) as app:
        groups = app.list_all_config_groups()
    assert {"mine", "experiment", "hydra/launcher"} <= {*groups}
    assert max(group.count("/") for group in groups) == 1


GLOBAL = "# @package _global_\n"


def test_defaults_lists_that_multiply_are_refused(conf) -> None:
    files = {f"a/l{n}": f"defaults: [/a/l{n + 1}@x, /a/l{n + 1}@y]\n" for n in range(12)}
    folder = conf(**files, **{"a/l12": "a: 1\n", "experiment/mine": f"{GLOBAL}defaults: [/a/l0]\n"})
    with pytest.raises(SpecError, match=f"more than {MAX_LOADS:,} configs"):
        compose_dict(["experiment=mine"], folder)


GROUPS = ("model", "task", "experiment")


def test_keys_that_run_code_are_found_at_any_depth() -> None:
    content = {"a": [{"b": {"_target_": "os.system"}}], "()": 1, "c": "_target_"}
    assert sorted(problem.what for problem in acting_keys(content, "f")) == [
        "holds the key `()`, which would run code",
        "holds the key `_target_`, which would run code",
    ]


def test_a_file_may_choose_a_launcher_but_no_logging() -> None:
    logging = ({"override /hydra/job_logging": "default"}, {"../job_logging": "default"})
    for item in (*logging, {"/hydra/callbacks@x": "evil"}, "/hydra/output/other"):
        assert len([*wrong_choices([item], "hydra/launcher", "f")]) == 1, item
    fine = [{"override /hydra/launcher": "joblib"}, {"override /model@x": "cnn"}, "_self_"]
    assert [*wrong_choices(fine, "experiment", "f")] == []


def test_only_harmless_settings_are_accepted() -> None:
    fine = {"mode": "MULTIRUN", "launcher": {"n_jobs": 2, "partition": "gpu"}, "job": {"name": "mine"}}
    assert wrong_settings(fine, GROUPS) == []
    launchers = (
        {"python": "touch x"},
        {"partition": "a\nb"},
        {"n_jobs": 10**9},
        {"_target_": "evil.Launcher"},
    )
    sections = (
        {"run": {"dir": "../x"}},
        {"job": {"env_set": {"A": "b"}}},
        {"callbacks": {}},
        {"searchpath": ["/"]},
    )
    for wrong in (*sections, *({"launcher": each} for each in launchers), "${evil}"):
        assert len(wrong_settings(wrong, GROUPS)) == 1, wrong


def test_swept_keys_must_be_keys_of_the_experiment() -> None:
    fine = {"seed": "1,2", "model": "mlp,cnn", "hooks.a.max": "choice(1,2)", "+vars.x": 3}
    assert [*wrong_params(fine, "p", GROUPS)] == []
    for key in ("hydra.run.dir", " seed", "'seed'", "seed=1,b", "hydra[run]", "", "resume", "fail_fast"):
        assert len([*wrong_params({key: "1,2"}, "p", GROUPS)]) == 1, key


def test_only_the_command_line_can_trust() -> None:
    assert TRUST.what == "is taken from the command line only, never from a file"
    swept = {"sweeper": {"params": {"+trust": "a"}}}
    as_if_typed = {"overrides": {"task": ["+trust=a"]}}
    assert wrong_settings(swept, GROUPS) == wrong_settings(as_if_typed, GROUPS) == [TRUST]
    with pytest.raises(SpecError, match=f"trust: {TRUST.what}"):
        parse_experiment({**compose_dict([]), "trust": ["mypkg"]})


def test_an_experiment_is_plain_data_without_hydras_part(cwd) -> None:
    config = compose_dict(["experiment=clip_fc", "seed=3"])
    assert list(cwd.iterdir()) == []
    clip = {"select": "fc", "hook": "grad", "action": "clamp", "min": -0.01, "max": 0.01}
    assert config["hooks"] == {"clip_fc": clip}
    assert config["seed"] == 3
    roots = {"task", "model", "data", "train", "compute", "hooks", "seed", "strict", "objective", "tags"}
    assert set(config) == roots | {"baseline", "hooked", "note"}


def test_the_defaults_are_a_valid_experiment_without_hooks() -> None:
    experiment = parse_experiment(compose_dict())
    assert experiment.hooks.hooks == ()
    assert experiment.settings.task.name == "train"
    assert experiment.settings.model.name == "cnn"


def test_interpolations_are_resolved(conf) -> None:
    folder = conf(**{"experiment/mine": "# @package _global_\nseed: 4\ntrain: {epochs: '${seed}'}\n"})
    assert compose_dict(["experiment=mine"], folder)["train"]["epochs"] == 4


@pytest.mark.parametrize("typed", ["experiment=clip_fx", "seed=${nowhere}", "a", "seed=1,2"])
def test_mistakes_raise_spec_errors(typed: str) -> None:
    with pytest.raises(SpecError):
        compose_dict([typed])


def test_a_missing_folder_raises_a_spec_error(tmp_path) -> None:
    with pytest.raises(SpecError, match=re.escape(f"config_dir: there is no folder {tmp_path}/nowhere")):
        compose_dict(config_dir=tmp_path / "nowhere")


def test_it_works_inside_an_application_that_uses_hydra_itself(conf) -> None:
    with initialize_config_dir(conf(config="theirs: 1\n"), version_base="1.3"):
        assert compose_dict(["seed=3"])["seed"] == 3
        assert compose("config").theirs == 1
