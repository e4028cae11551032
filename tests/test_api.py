"""The Python API: a spec from a file, a dict or an experiment; the model and data of an experiment; hooks in a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.cli import main

HOOKS = """
features:
  select: "0"
  hook: forward
  action: capture
"""


def test_a_spec_comes_from_a_file_or_a_dict(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text(HOOKS)
    (tmp_path / "whole.yaml").write_text("hooks:" + HOOKS.replace("\n", "\n  "))
    as_dict = {"features": {"select": "0", "hook": "forward", "action": "capture"}}
    specs = [hookrun.load_spec(tmp_path / name) for name in ("bare.yaml", "whole.yaml")]
    assert specs[0] == specs[1] == hookrun.load_spec(as_dict) == hookrun.load_spec({"hooks": as_dict})
    (hook,) = hookrun.load_spec(experiment="clip_fc", overrides=["hooks.clip_fc.max=0.5", "seed=7"]).hooks
    assert hook.name == "clip_fc"
    assert hook.action.model_dump() == {"min": -0.01, "max": 0.5}


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
        (
            "off: {select: fc, hook: forward, action: print}",
            "YAML reads on, off, yes and no as true and false",
        ),
        ("a:\n  select: fc\n  hook: *x\n", "h.yaml:3:9: found undefined alias 'x'"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "h.yaml").write_text(content)
    with pytest.raises(hookrun.SpecError) as caught:
        hookrun.load_spec(tmp_path / "h.yaml")
    assert said in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hookrun.SpecError, match="there is no such file"):
        hookrun.load_spec(tmp_path / "none.yaml")
    with pytest.raises(hookrun.SpecError, match="takes a file or a dict"):
        hookrun.load_spec()


def test_a_misspelt_path_gets_the_nearest_names(tmp_path: Path) -> None:
    (tmp_path / "sae").mkdir()
    for name in ("hooks.yaml", "values.safetensors", "sae/cfg.json"):
        (tmp_path / name).touch()
    with pytest.raises(hookrun.SpecError, match=r"there is no such file; did you mean 'hooks.yaml'\?"):
        hookrun.load_spec(tmp_path / "hoks.yaml")
    on = {"select": "0", "hook": "forward"}
    hooks = {
        "a": {**on, "action": "add_bias", "value": {"file": str(tmp_path / "value.safetensors")}},
        "b": {**on, "action": "sparse_autoencoder", "weights": {"folder": str(tmp_path / "saes")}},
    }
    with pytest.raises(hookrun.CompileError) as caught:
        hookrun.compile(hooks, nn.Sequential(nn.ReLU()))
    said = str(caught.value)
    assert f"{tmp_path}/value.safetensors; did you mean 'values.safetensors'?" in said
    assert "by cp -rL; did you mean 'sae'?" in said


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


SMALL = ["compute.device=cpu", "compute.threads=1"]


def test_a_plain_loop_over_it_has_the_weights_of_a_run(tmp_path: Path) -> None:
    train = [
        "train.epochs=2", "train.limit_batches=3", "train.optimizer.name=SGD", "seed=3", "data.batch_size=16",
    ]  # fmt: skip
    assert main([*SMALL, "experiment=clip_fc", *train, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    model, data = hookrun.build(experiment="clip_fc", overrides=[*SMALL, *train])
    spec = hookrun.load_spec(experiment="clip_fc", overrides=train)
    optimizer = torch.optim.SGD(model.parameters(), lr=data.settings.train.optimizer.args["lr"])
    loader = data.loader("train")
    with hookrun.record(model, spec, run_dir=tmp_path / "own") as hooks:
        for _ in range(2):
            for batch in loader:
                hooks.samples = batch.ids
                loss = nn.functional.cross_entropy(model(batch.inputs), batch.target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            hooks.epoch()
    last, _ = hookrun.build(
        experiment="clip_fc",
        overrides=[*SMALL, f"model.weights={tmp_path / 'run/checkpoints/last.safetensors'}"],
    )
    assert all(map(torch.equal, model.state_dict().values(), last.state_dict().values()))
    assert len(loader) == 3
    assert data.info.num_classes == 10
    assert list(data) == ["train", "val"]
    inputs, target = data["val"][5]
    (first, *_) = data.loader("val")
    assert torch.equal(first.inputs[5], inputs)
    assert first.ids[5] == 5
    assert first.target[5] == target
    assert torch.equal(next(loader.epoch(0)).ids, next(data.loader("train").epoch(0)).ids)
    assert first.to("meta").inputs.device.type == "meta"
    assert torch.equal(first.to("meta").ids, first.ids)


def test_its_errors_are_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, data = hookrun.build(overrides=SMALL)
    with pytest.raises(KeyError, match="did you mean 'train'"):
        data["trian"]
    with pytest.raises(hookrun.SpecError, match="did you mean 'digits'"):
        hookrun.build(overrides=["data.name=digit"])
    (tmp_path / "built_models.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Flatten()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = [*SMALL, "model=python", "model.factory=built_models:make"]
    with pytest.raises(hookrun.SpecError, match="trust"):
        hookrun.build(overrides=own)
    model, _ = hookrun.build(overrides=[*own, "+trust=[built_models]"])
    assert type(model) is nn.Flatten
    monkeypatch.setenv("HOOKRUN_TRUST", "built_models")
    assert type(hookrun.build(overrides=own)[0]) is nn.Flatten


def test_an_example_that_is_one_tensor_is_refused() -> None:
    spec = {"h": {"select": "", "hook": "forward", "action": "capture"}}
    with pytest.raises(hookrun.HookrunError, match=r"expected \(args, kwargs\)"):
        hookrun.compile(spec, nn.Identity(), example=torch.zeros(2, 1))  # type: ignore[arg-type]
