"""Bundles: the hooks of a run that edit, handed on in a folder, give the same numbers elsewhere."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from saved_autoencoders import KEPT, WIDTH, saved
from torch import nn

import hookrun
from hookrun.bundle import main
from hookrun.errors import CompileError, HookrunError, SpecError
from hookrun.run.bundling import write_bundle
from hookrun.store.format import CONFIG, STATUS
from hookrun.store.manifest import hashed
from hookrun.store.reader import Run

SEEN = (
    "model=cnn",
    "task=predict",
    "train.limit_batches=1",
    "+hooks.seen={select: [relu1, relu2], hook: forward, action: capture}",
)
MEAN = "+hooks.ablate={select: 're:relu.', hook: forward, action: replace, value: {run: RUN, capture: seen}}"
TRAINED = (
    "model=cnn",
    "train.limit_batches=1",
    "train.epochs=2",
    "+hooks.shift={select: [relu1, relu2], hook: forward, action: add_bias, value: 0.1, trainable: true}",
    "+hooks.seen={select: fc, hook: forward, action: stats}",
    "+hooks.start={select: conv1, hook: apply, action: init, name: normal_}",
)


def cnn() -> nn.Module:
    """A model as those of the runs, with other weights."""
    model, _ = hookrun.build(overrides=["model=cnn", "compute.device=cpu"])
    return model.eval()


def by_hand(model: nn.Module, edits: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    """The output for one batch of numbers under torch's own hooks."""
    handles = [
        model.get_submodule(path).register_forward_hook(lambda module, args, x, edit=edit: edit(x))
        for path, edit in edits.items()
    ]
    with torch.no_grad():
        output = model(inputs())
    for handle in handles:
        handle.remove()
    assert isinstance(output, torch.Tensor)
    return output


def inputs() -> torch.Tensor:
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def under(bundle: Path, model: nn.Module) -> torch.Tensor:
    with hookrun.hooked(model, hookrun.load_bundle(bundle)), torch.no_grad():
        output = model(inputs())
    assert isinstance(output, torch.Tensor)
    return output


def write_experiment(folder: Path, hooks: dict[str, Any], **keys: Any) -> None:
    """An experiment `mine` in a config folder."""
    (folder / "experiment").mkdir()
    text = yaml.safe_dump({"hooks": hooks, **keys}, sort_keys=False)
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")


@pytest.fixture(scope="module")
def seen(shared: Callable[..., Run]) -> Run:
    return shared(*SEEN)


@pytest.fixture(scope="module")
def ablated(shared: Callable[..., Run], seen: Run) -> Run:
    return shared(*SEEN[:3], MEAN.replace("RUN", str(seen.path)))


@pytest.fixture(scope="module")
def trained(shared: Callable[..., Run]) -> Run:
    return shared(*TRAINED)


@pytest.fixture
def bundle(ablated: Run, tmp_path: Path) -> Path:
    """The mean ablation of both layers, in the folder of the test."""
    write_bundle(ablated.path, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def copied(ablated: Run, tmp_path: Path) -> Path:
    return shutil.copytree(ablated.path, tmp_path / "copied")


def test_values_of_runs_are_copied_in(bundle: Path, seen: Run, tmp_path: Path) -> None:
    moved = bundle.rename(tmp_path / "moved")
    model = cnn()
    edits = dict[str, Any]()
    for path in ("relu1", "relu2"):
        rows = seen.captures["seen"][path][:]
        mean = (rows.double().sum(0) / len(rows)).float()
        edits[path] = lambda x, mean=mean: mean.expand_as(x).clone()
    assert torch.equal(under(moved, model), by_hand(model, edits))


def test_hooks_from_gives_what_the_run_had(bundle: Path, ablated: Run, executed: Any) -> None:
    again = executed(*SEEN[:3], f"hooks_from={bundle.name}")
    assert ablated.predictions is not None
    assert torch.equal(again.predictions[:], ablated.predictions[:])
    assert again.plan["bundle"]["hooks"] == ["ablate"]


def test_learned_parameters_are_those_of_best(trained: Run, tmp_path: Path) -> None:
    made = write_bundle(trained.path, tmp_path / "b")
    best = load_file(trained.path / "checkpoints/best.safetensors")
    assert set(made.left_out) == {"seen", "start"}
    model = cnn()
    learned = {path: best.pop(f"{path}.shift_bias") for path in ("relu1", "relu2")}
    model.load_state_dict(best)
    edits = {path: (lambda x, bias=bias: x + bias) for path, bias in learned.items()}
    expected = by_hand(model, edits)
    assert torch.equal(under(tmp_path / "b", model), expected)
    assert model.get_parameter("relu2.shift_bias").requires_grad


def test_without_best_they_are_those_of_last(trained: Run, tmp_path: Path, executed: Any) -> None:
    run = executed(*TRAINED, "train.checkpoint.save=last")
    write_bundle(run.path, tmp_path / "b")
    last = load_file(run.path / "checkpoints/last.safetensors")
    stored = load_file(tmp_path / "b/tensors.safetensors")
    assert torch.equal(stored["shift.shift_bias/relu1"], last["relu1.shift_bias"])


def test_tensors_keep_dtype_and_shape(tmp_path: Path, executed: Any) -> None:
    values = {
        "bf16": torch.randn(10).bfloat16(),
        "fp8": torch.randn(10).to(torch.float8_e4m3fn),
        "int": torch.arange(10),
        "single": torch.tensor(2.5, dtype=torch.float64),
    }
    save_file(values, tmp_path / "v.safetensors")
    hooks = list[str]()
    for name in values:
        value = f"{{file: v.safetensors, key: {name}, factor: 3}}"
        hooks.append(f"+hooks.{name}={{select: fc, hook: forward, action: add_bias, value: {value}}}")
    run = executed(*SEEN[:3], *hooks)
    write_bundle(run.path, tmp_path / "b")
    stored = load_file(tmp_path / "b/tensors.safetensors")
    for name, value in values.items():
        kept = stored[f"{name}.value"]
        assert (kept.dtype, kept.shape) == (value.dtype, value.shape)
    again = executed(*SEEN[:3], "hooks_from=b")
    assert torch.equal(again.predictions[:], run.predictions[:])


def test_an_autoencoder_goes_along(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2))
    with_sae = {"weights": {"folder": str(saved(tmp_path / "sae", architecture="topk", k=KEPT))}}
    hooks = {
        "sae": {"select": "0", "hook": "forward", "action": "sparse_autoencoder", **with_sae},
        "half": {"select": "hook:sae.features", "hook": "forward", "action": "scale", "factor": 0.5},
    }
    write_experiment(tmp_path, hooks)
    options = {"config_dir": tmp_path, "run_dir": tmp_path / "run", "quiet": True}
    run = hookrun.run("mine", ["task=predict"], model=model, data=[torch.ones(4)], **options)
    write_bundle(run.path, tmp_path / "b")
    with hookrun.hooked(model, {"hooks": hooks}), torch.no_grad():
        expected = model(torch.ones(3, 4))
    shutil.rmtree(tmp_path / "sae")
    shutil.rmtree(run.path)
    moved = (tmp_path / "b").rename(tmp_path / "moved")
    with hookrun.hooked(model, hookrun.load_bundle(moved)), torch.no_grad():
        assert torch.equal(model(torch.ones(3, 4)), expected)
    config = moved / "sae.weights" / "cfg.json"
    config.write_text(config.read_text().replace('"k": 5', '"k": 4'))
    with pytest.raises(SpecError, match=r"sae.weights/cfg\.json was changed"):
        hookrun.load_bundle(moved)


def test_a_capture_that_an_edit_reads_stays(executed: Any, tmp_path: Path) -> None:
    run = executed(
        *SEEN[:3],
        "+hooks.from={select: conv1, hook: forward, action: capture}",
        "+hooks.to={select: relu1, hook: forward, action: add_bias, value: {hook: from}}",
    )
    assert list(write_bundle(run.path, tmp_path / "b").hooks) == ["from", "to"]


# ---- what it fits


class Net(nn.Module):
    """Layers of the names that the bundle's hooks have, of another width or with more of them."""

    def __init__(self, width: int = 128, more: int = 0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(32, width, 3, padding=1, stride=2)
        self.relu2 = nn.ReLU()
        self.relu3 = nn.Sequential(OrderedDict((f"relu{each}", nn.ReLU()) for each in range(more)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.relu3(self.relu2(self.conv2(self.relu1(self.conv1(x)))))
        return y


def test_another_width_is_refused_with_both_shapes(bundle: Path) -> None:
    with pytest.raises(CompileError) as raised:
        hookrun.compile(hookrun.load_bundle(bundle), Net(width=64))
    with pytest.raises(CompileError, match=r"\[128, 4, 4\]"):
        hookrun.compile(hookrun.load_bundle(bundle), Net(width=64).double())
    (problem,) = raised.value.errors
    assert "[128, 4, 4]" in problem.what
    assert "[2, 64, 4, 4]" in problem.what
    assert "made for the model class CNN" in problem.hint


def test_another_prefix_is_refused_with_the_names(bundle: Path) -> None:
    with pytest.raises(CompileError, match=r"did you mean 'net.relu1'"):
        hookrun.compile(hookrun.load_bundle(bundle), nn.ModuleDict({"net": Net()}))


def test_a_deeper_model_is_edited_where_the_run_was(bundle: Path) -> None:
    plan = hookrun.compile(hookrun.load_bundle(bundle), Net(more=2))
    assert [match.path for match in plan.hooks[0].matches] == ["relu1", "relu2"]
    assert "made for the model class CNN" in str(plan)


# ---- hooks_from


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    from hookrun.cli import main as command

    command(["task=plan", "--json", "compute.device=cpu", *overrides])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_overrides_change_hooks_of_a_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"hooks_from={bundle.name}"
    said = planned(capsys, name, "+hooks.ablate.value.factor=0.5", "hooks.ablate.select=relu1")
    (hook,) = said["plan"]["hooks"]
    assert (hook["matches"], hook["params"]["value"]["factor"]) == (["relu1"], 0.5)
    assert planned(capsys, name, "hooks.ablate.enabled=false")["plan"]["hooks"] == []
    assert planned(capsys, name, "~hooks.ablate")["plan"]["hooks"] == []
    assert len(planned(capsys, name, "hooks=none")["plan"]["hooks"]) == 1
    (mistake,) = planned(capsys, name, "hooks.ablate.selct=relu1")["mistakes"]
    assert mistake["fix"] == {"key": "hooks.ablate.select", "value": "relu1"}


def test_a_misspelt_folder_gets_the_nearest_ones(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hookrun.cli.main(["task=plan", f"hooks_from={bundle}s"]) == 2
    assert "`python -m hookrun.bundle RUN OUT` wrote; did you mean 'bundle'?\n" in capsys.readouterr().err
    with pytest.raises(SpecError, match="wrote; did you mean 'bundle'"):
        hookrun.load_bundle(bundle.with_name("bundel"))


def test_equal_names_are_refused(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = "{select: fc, hook: forward, action: scale, factor: 2}"
    (mistake,) = planned(capsys, f"hooks_from={bundle.name}", f"+hooks.ablate={hook}")["mistakes"]
    assert mistake["where"] == "hooks.ablate"
    with pytest.raises(SpecError, match="expected the folder of one bundle"):
        hookrun.load_spec({"hooks_from": ["a", "b"], "hooks": {}})
    with pytest.raises(SpecError, match=r"hooks\.ablate: the bundle .* has a hook of this name, too"):
        hookrun.load_spec({"hooks_from": str(bundle), "hooks": {"ablate": yaml.safe_load(hook)}})
    spec = hookrun.load_spec({"hooks_from": str(bundle), "hooks": {"more": yaml.safe_load(hook)}})
    assert [each.name for each in spec.hooks] == ["ablate", "more"]


def test_a_file_may_name_a_bundle(bundle: Path, tmp_path: Path) -> None:
    hooks = {"more": {"select": "fc", "hook": "forward", "action": "scale", "factor": "${vars.by}"}}
    write_experiment(tmp_path, hooks, hooks_from=str(bundle), vars={"by": "${seed}"})
    spec = hookrun.load_spec(experiment="mine", config_dir=tmp_path, overrides=["seed=7"])
    assert [each.name for each in spec.hooks] == ["ablate", "more"]
    assert spec.hooks[1].action.factor == 7  # type: ignore[attr-defined]


def test_jobs_may_sweep_over_bundles(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(bundle, bundle.with_name("other"))
    text = (other / "hooks.yaml").read_text().replace("    - relu2\n", "")
    (other / "hooks.yaml").write_text(text)
    said = planned(capsys, "-m", "hooks_from=bundle,other", "+hooks.ablate.value.factor=0,1")
    found = [(job["plan"]["hooks"][0]["matches"], job["plan"]["hooks"][0]["params"]) for job in said["jobs"]]
    assert [len(matches) for matches, _ in found] == [2, 2, 1, 1]
    assert [params["value"]["factor"] for _, params in found] == [0, 1, 0, 1]


def test_the_plan_knows_the_content_of_a_bundle(bundle: Path) -> None:
    before = hookrun.compile(hookrun.load_bundle(bundle), cnn())
    (bundle / "README.md").write_text("my own words")
    assert hookrun.compile(hookrun.load_bundle(bundle), cnn()).hash == before.hash
    (bundle / "hooks.yaml").write_text((bundle / "hooks.yaml").read_text() + "# changed\n")
    assert hookrun.compile(hookrun.load_bundle(bundle), cnn()).hash != before.hash


def test_a_run_is_resumed_with_the_same_bundle_only(
    bundle: Path, run: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    from hookrun.cli import main as command

    path = run(
        "model=cnn",
        "train.epochs=1",
        "train.limit_batches=1",
        "train.checkpoint.keep_done=true",
        "hooks_from=bundle",
    ).path
    status = json.loads((path / STATUS).read_text()) | {"status": "interrupted"}
    (path / STATUS).write_text(json.dumps(status))
    hooks = (bundle / "hooks.yaml").read_text()
    (bundle / "hooks.yaml").write_text(f"{hooks}# changed\n")
    assert command([f"resume={path}"]) == 2
    assert "plan.bundle.sha256" in capsys.readouterr().err
    (bundle / "hooks.yaml").write_text(hooks)
    moved = bundle.rename(bundle.with_name("moved"))
    assert command([f"resume={path}"]) == 2
    assert "cannot read bundle/model.json" in capsys.readouterr().err
    moved.rename(bundle)
    assert command([f"resume={path}"]) == 0
    assert [hook["name"] for hook in hookrun.open_run(path).plan["hooks"]] == ["ablate"]


# ---- what cannot be handed on


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+hooks.a={select: fc, hook: forward, action: stats}"], "no hooks that edit; a: it only observes"),
        (["+hooks.a={select: fc, hook: forward, action: scale, factor: 2}", "hooked=false"], "hooked: false"),
        ([MEAN.replace("capture: seen", "capture: seen, sample: same")], "belongs to samples of a run"),
        (
            ["+hooks.a={select: fc, hook: forward, action: python, function: 'hookrun.examples:soften'}"],
            "nothing in a bundle runs code",
        ),
    ],
)
def test_a_run_without_an_edit_to_hand_on(
    overrides: list[str],
    message: str,
    seen: Run,
    executed: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOOKRUN_TRUST", "hookrun")
    run = executed(*SEEN[:3], *(text.replace("RUN", str(seen.path)) for text in overrides))
    with pytest.raises(HookrunError) as raised:
        write_bundle(run.path, tmp_path / "b")
    assert message in str(raised.value)
    assert not (tmp_path / "b").exists()


def test_a_recorded_loop_is_refused_with_the_way(tmp_path: Path) -> None:
    """A run of the same hooks on a model of one's own has its configuration, and is handed on."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    double = {"double": {"select": "1", "hook": "forward", "action": "scale", "factor": 2}}
    with hookrun.record(model, double, tmp_path / "recorded"):
        model(torch.ones(1, 4))
    with pytest.raises(
        SpecError, match=r"RUN: .* no .hydra/config.yaml[^$]*hookrun.run\(EXPERIMENT, model=…"
    ):
        write_bundle(tmp_path / "recorded", tmp_path / "b")
    write_experiment(tmp_path, double, task={"name": "predict"})
    data = [(torch.ones(4), 0), (-torch.ones(4), 1)]
    run = hookrun.run(
        "mine", config_dir=tmp_path, model=model, data=data, run_dir=tmp_path / "run", quiet=True
    )
    write_bundle(run.path, tmp_path / "b")
    with hookrun.hooked(model, hookrun.load_bundle(tmp_path / "b")), torch.no_grad():
        assert model(data[0][0]).equal(model[0](data[0][0]).relu() * 2)


def test_values_that_have_changed_are_refused(executed: Any, tmp_path: Path) -> None:
    save_file({"v": torch.zeros(10)}, tmp_path / "v.safetensors")
    hook = "{select: fc, hook: forward, action: add_bias, value: {file: v.safetensors}}"
    run = executed(*SEEN[:3], f"+hooks.add={hook}")
    save_file({"v": torch.ones(10)}, tmp_path / "v.safetensors")
    with pytest.raises(SpecError, match="have changed since"):
        write_bundle(run.path, tmp_path / "b")


def test_a_damaged_run_is_refused(copied: Path, tmp_path: Path) -> None:
    (copied / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(SpecError, match="is damaged"):
        write_bundle(copied, tmp_path / "b")


def test_a_run_that_goes_on_is_refused(copied: Path, tmp_path: Path) -> None:
    status = json.loads((copied / STATUS).read_text()) | {"status": "running", "pid": os.getpid()}
    (copied / STATUS).write_text(json.dumps(status))
    with pytest.raises(SpecError, match="has not ended well: it is running"):
        write_bundle(copied, tmp_path / "b")


def test_a_stored_hook_of_another_name_is_refused(copied: Path, tmp_path: Path) -> None:
    config = copied / CONFIG
    config.write_text(config.read_text().replace("ablate:", "ablute:"))
    manifest = json.loads((copied / "manifest.json").read_text())
    size, digest = hashed(config)
    manifest["files"][CONFIG] = {"bytes": size, "sha256": digest}
    (copied / "manifest.json").write_text(json.dumps(manifest))
    status = json.loads((copied / STATUS).read_text())
    status["manifest"] = hashed(copied / "manifest.json")[1]
    (copied / STATUS).write_text(json.dumps(status))
    with pytest.raises(SpecError, match="have different hooks"):
        write_bundle(copied, tmp_path / "b")


def test_the_command_says_what_it_wrote(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([copied.name, "out", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["answer"]["hooks"] == ["ablate"]
    assert said["answer"]["bytes"] == sum(x.nbytes for x in load_file("out/tensors.safetensors").values())
    assert main([copied.name, "my out,2"]) == 0
    *_, applied = shlex.split(capsys.readouterr().out)
    assert planned(capsys, "model=cnn", applied)["ok"]
    assert main([copied.name, "out"]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert main(["copid", "out2", "--json"]) == 2
    (mistake,) = json.loads(capsys.readouterr().out)["mistakes"]
    assert mistake["where"] == "RUN"
    assert "copied" in mistake["what"]
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])


def test_a_write_that_fails_leaves_nothing(
    ablated: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(HookrunError, match="No space left"):
        write_bundle(ablated.path, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_the_card_says_what_it_does_and_escapes(executed: Any, tmp_path: Path) -> None:
    note = "note='<script>alert(1)</script> [x](http://a)'"
    run = executed(*SEEN[:3], "+hooks.half={select: fc, hook: forward, action: scale, factor: 0.5}", note)
    write_bundle(run.path, tmp_path / "b")
    card = (tmp_path / "b/README.md").read_text()
    assert "half   fc" in card
    assert "hooks_from: FOLDER" in card
    assert "<script>" not in card
    assert "[x](" not in card
    assert r"\<script\>alert(1)" in card
