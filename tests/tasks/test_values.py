"""Values from other runs: activation patching, mean and resample ablation, steering, from configuration only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun
from hookrun.store.reader import Run

BASE = ("model=mlp", "data.batch_size=50", "compute.device=cpu", "compute.threads=1")
SEEN = "+hooks.seen={select: [layers.1,fc], hook: forward, action: capture}"
BEFORE = "+hooks.before={select: layers.1, hook: forward, action: capture, priority: -1}"


@pytest.fixture
def clean(shared: Any) -> Run:
    """A run whose activations others use: 359 samples of the validation split."""
    return shared(*BASE, "task=predict", SEEN)


def patch(run: Run, select: str = "layers.1", module: str = "layers.1", **keys: Any) -> str:
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    value = f"{{run: '{run.path}', capture: seen, module: {module}{more}}}"
    return f"+hooks.patch={{select: {select}, hook: forward, action: replace, value: {value}}}"


def test_patching_the_same_sample_of_a_clean_run_restores_its_output(executed: Any, clean: Run) -> None:
    """A corrupted run whose layer is patched from the clean one computes what the clean one did, in any batching."""
    corrupt = "+hooks.corrupt={select: layers.0, hook: forward, action: noise, std: 3}"
    patched = executed(
        *BASE, "task=predict", corrupt, BEFORE, patch(clean, sample="same"), "data.batch_size=64"
    )
    assert_close(patched.predictions[:], clean.predictions[:])
    broken = patched.captures["before"]["layers.1"][:]
    assert not torch.allclose(broken, clean.captures["seen"]["layers.1"][:], atol=0.1)


def test_clean_and_corrupted_inputs_of_two_files(
    run: Any, executed: Any, tmp_path: Path, capsys: Any
) -> None:
    """Sample n of one file corresponds to sample n of the other; the plan notes that they are not the same."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    save_file({"x": x, "y": torch.arange(40) % 3}, tmp_path / "clean.safetensors")
    save_file({"x": -x.roll(1, 0), "y": torch.arange(40) % 3}, tmp_path / "corrupted.safetensors")
    columns = "data.args={file: %s.safetensors, input: x, target: y, num_classes: 3}"
    of = [("data=tensors", "model=mlp", "task=predict", columns % name) for name in ("clean", "corrupted")]
    clean = run(*of[0], SEEN)
    capsys.readouterr()
    patched = executed(*of[1], BEFORE, patch(clean, sample="same"))
    assert_close(patched.predictions[:], clean.predictions[:])
    broken = patched.captures["before"]["layers.1"][:]
    assert not torch.allclose(broken, clean.captures["seen"]["layers.1"][:], atol=0.01)
    assert f"NOTE: values come from {clean.path}, where data.args is " in capsys.readouterr().out


MEANS = {"mean": "", "mean_named": ", sample: mean", "mean_reduced": ", reduce: mean"}


@pytest.fixture
def other(shared: Any) -> Run:
    """The same captures of a model of another seed."""
    return shared(*BASE, "task=predict", SEEN, "seed=1")


@pytest.fixture
def edited(shared: Any, clean: Run, other: Run) -> Callable[..., Tensor]:
    """What layers.1 returned after each of several edits, which one run makes one after another."""
    of = f"run: '{clean.path}', capture: seen, module: layers.1"
    actions = {"steered": f"add_bias, value: {{{of}, minus: {{run: '{other.path}'}}}}"}
    actions |= {name: f"replace, value: {{{of}{keys}}}" for name, keys in MEANS.items()}
    actions["drawn"] = f"replace, value: {{{of}, sample: resample}}"
    typed = []
    for name, action in actions.items():
        typed.append(f"+hooks.edit_{name}={{select: layers.1, hook: forward, action: {action}}}")
        typed.append(f"+hooks.{name}={{select: layers.1, hook: forward, action: capture}}")

    def edited(name: str, *more: str) -> Tensor:
        found: Tensor = shared(*BASE, "task=predict", *typed, *more).captures[name]["layers.1"][:]
        return found

    return edited


@pytest.mark.parametrize("name", MEANS)
def test_mean_ablation(edited: Any, clean: Run, name: str) -> None:
    mean = clean.captures["seen"]["layers.1"][:].mean(0)
    assert_close(edited(name), mean.expand(359, -1))


def test_resample_ablation_gives_each_sample_another_one_s_value(edited: Any, clean: Run) -> None:
    own = clean.captures["seen"]["layers.1"][:]
    drawn = edited("drawn")
    nearest = torch.cdist(drawn, own).argmin(1)
    assert_close(drawn, own[nearest])
    assert not (nearest == torch.arange(len(own))).any()
    assert len(nearest.unique()) > 150
    again = edited("drawn", "data.workers=0")
    assert torch.equal(again, drawn), "with the same seed the same draws"


def test_steering_by_the_difference_of_two_runs_means(edited: Any, clean: Run, other: Run) -> None:
    means = [found.captures["seen"]["layers.1"][:].mean(0) for found in (clean, other)]
    expected = clean.captures["seen"]["layers.1"][:] + means[0] - means[1]
    assert_close(edited("steered"), expected, rtol=1e-4, atol=1e-5)


# ---- mistakes are found before the run


def test_a_module_that_was_not_captured(refused: Any, clean: Run) -> None:
    said = refused(*BASE, "task=predict", patch(clean, module="layers.3"))
    assert "hooks.patch.value: no module 'layers.3' in the captures of 'seen': did you" in said


def test_samples_without_a_row(executed: Any, refused: Any, ready: Any) -> None:
    short = executed(*BASE, "task=predict", SEEN, "train.limit_batches=2")
    said = refused(*BASE, "task=predict", patch(short, sample="same"))
    assert "hooks.patch.value: seen/layers.1 of the run" in said
    assert "has no row of sample 100, 101, 102, 103, …: it has 100 samples from 0 to 99" in said
    ready(*BASE, "task=predict", patch(short, sample="same"), "train.limit_batches=2")


def test_validation_has_no_rows_of_the_training_samples(executed: Any, ready: Any, refused: Any) -> None:
    train = executed(*BASE, "task=predict", "task.split=train", SEEN)
    assert "add when: {mode: train}" in refused(*BASE, patch(train, sample="same"))
    when = patch(train, sample="same").replace("action: replace", "action: replace, when: {mode: train}")
    ready(*BASE, when)


@pytest.mark.parametrize(
    "keys",
    [
        {"hook": "grad", "action": "replace", "select": "fc.weight"},
        {"hook": "forward", "action": "add_bias", "trainable": "true", "select": "fc"},
        {"hook": "apply", "action": "fill", "select": "fc"},
    ],
    ids=lambda keys: keys["action"],
)
def test_a_value_for_each_sample_goes_with_a_batch_of_samples(refused, clean, keys: dict[str, str]) -> None:
    body = ", ".join(f"{key}: {value}" for key, value in keys.items())
    value = f"{{run: '{clean.path}', capture: seen, module: fc, sample: same}}"
    said = refused(*BASE, f"+hooks.p={{{body}, value: {value}}}")
    assert "a value for each sample goes with hooks that see a batch of samples" in said


# ---- in memory


def spec_of(run: Run, sample: Any) -> dict[str, Any]:
    value = {"run": str(run.path), "capture": "seen", "module": "fc", "sample": sample}
    return {"p": {"select": "", "hook": "forward", "action": "replace", "value": value}}


def test_in_a_user_s_own_loop_the_samples_are_named(clean: Run) -> None:
    model = nn.Linear(3, 10)
    ids = [5, 300, 7]
    with hookrun.hooked(model, spec_of(clean, "same")) as hooks:
        hooks.samples = ids
        found = model(torch.ones(3, 3))
    assert_close(found, clean.captures["seen"]["fc"][ids])


def test_without_names_and_with_too_many_it_is_an_error(clean: Run) -> None:
    model = nn.Linear(3, 10)
    with hookrun.hooked(model, spec_of(clean, "same")) as hooks:
        with pytest.raises(hookrun.HookrunError, match="does not know which samples these are"):
            model(torch.ones(3, 3))
        hooks.samples = torch.arange(4)
        with pytest.raises(hookrun.HookrunError, match=r"the batch has 4 samples, the tensor"):
            model(torch.ones(3, 3))
        hooks.samples = [0, 1, 400]
        with pytest.raises(hookrun.HookrunError, match="has no row of sample 400"):
            model(torch.ones(3, 3))


def test_resampled_rows_are_the_same_when_checkpointing_repeats_a_call(clean: Run) -> None:
    from torch.utils.checkpoint import checkpoint

    gradients = list[Tensor]()
    for repeated in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 10), nn.Identity(), nn.Linear(10, 2))
        spec = {"p": {**spec_of(clean, "resample")["p"], "select": "1", "action": "scale"}}
        spec["p"]["factor"] = spec["p"].pop("value")
        x = torch.ones(4, 3, requires_grad=True)
        with hookrun.hooked(model, spec) as hooks:
            hooks.samples = range(4)
            (checkpoint(model, x, use_reentrant=False) if repeated else model(x)).square().sum().backward()
        gradients.append(x.grad)
    assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{run: r, capture: c, module: fc, modul: 3}", "modul: unknown key\n      did you mean 'module'"),
        ("{rnu: r}", "hooks.patch.value: found the keys rnu, expected `file`, `run`"),
        ("{run: r, capture: c, module: fc, sample: sam}", "sample: found 'sam', expected mean, same"),
        ("{run: r, capture: c, module: fc, minus: 3}", "minus: found 3, expected a mapping such"),
    ],
    ids=["a key", "a kind", "a sample", "minus"],
)
def test_a_misspelt_key_is_one_error(refused: Any, value: str, said: str) -> None:
    found = refused(*BASE, f"+hooks.patch={{select: fc, hook: forward, action: replace, value: {value}}}")
    assert said in found and found.startswith("1 configuration error")
