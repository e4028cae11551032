"""The Python API: a spec from a file, a dict or an experiment; three lines in a user's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookrun

HOOKS = """
features:
  select: "0"
  hook: forward
  action: capture
"""


def test_a_spec_from_a_file_a_dict_and_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text(HOOKS)
    (tmp_path / "whole.yaml").write_text("hooks:" + HOOKS.replace("\n", "\n  "))
    as_dict = {"features": {"select": "0", "hook": "forward", "action": "capture"}}
    specs = [hookrun.load_spec(tmp_path / name) for name in ("bare.yaml", "whole.yaml")]
    assert specs[0] == specs[1] == hookrun.load_spec(as_dict) == hookrun.load_spec({"hooks": as_dict})
    (hook,) = hookrun.load_spec(experiment="clip_fc", overrides=["hooks.clip_fc.max=0.5", "seed=7"]).hooks
    assert (hook.name, hook.action.model_dump()) == ("clip_fc", {"min": -0.01, "max": 0.5})


def test_an_experiment_of_the_users_own_folder(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\nhooks:" + HOOKS.replace("\n", "\n  ")
    )
    assert [hook.name for hook in hookrun.load_spec(experiment="mine", config_dir=tmp_path).hooks] == [
        "features"
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [1", "h.yaml:1:6: expected"),
        ("a:\n  select: *.b", "needs quotes"),
        ("- a", "holds no mapping"),
        ("defaults: [x]\nhooks: {}", "use load_spec(experiment=NAME)"),
        ("f: {select: fc, hook: forward, action: captur}", "did you mean 'capture'"),
        ("a:\n  select: fc\n  hook: *x\n", "h.yaml:3:9: found undefined alias 'x'"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "h.yaml").write_text(content)
    with pytest.raises(hookrun.SpecError) as caught:
        hookrun.load_spec(tmp_path / "h.yaml")
    assert said in str(caught.value)


def test_a_missing_file_and_no_source_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(hookrun.SpecError, match="there is no such file"):
        hookrun.load_spec(tmp_path / "none.yaml")
    with pytest.raises(hookrun.SpecError, match="takes a file or a dict"):
        hookrun.load_spec()


@pytest.mark.parametrize("model", [None, [nn.Linear(2, 2)], nn.Linear], ids=["none", "list", "class"])
def test_what_is_not_a_module_is_refused_in_words(model: Any) -> None:
    with pytest.raises(hookrun.HookrunError, match=r"model: found .*, expected a torch\.nn\.Module"):
        hookrun.hooked(model, {})


def test_a_mean_captured_by_another_run_is_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hookrun.cli import main

    monkeypatch.chdir(tmp_path)
    small = ["train.limit_batches=1", "compute.threads=1", "hydra.run.dir=clean"]
    assert main(["experiment=capture_features", *small]) == 0
    mean = hookrun.open_run("clean").captures["features"]["fc"][0:64].mean(0)
    model = nn.Sequential(nn.Linear(3, 10))
    value = {"run": "clean", "capture": "features", "module": "fc", "reduce": "mean"}
    hook = {"select": "0", "hook": "forward", "action": "replace", "value": value}
    with hookrun.hooked(model, {"h": hook}):
        torch.testing.assert_close(model(torch.ones(2, 3)), mean.expand(2, 10))
    with pytest.raises(hookrun.CompileError, match=r"hooks\.h\.value: "):
        hookrun.compile({"h": {**hook, "value": {**value, "module": "fcc"}}}, model)


def test_the_package_names_what_it_has() -> None:
    assert "compile" in dir(hookrun)
    with pytest.raises(AttributeError, match="no attribute 'compil'"):
        hookrun.compil  # noqa: B018
