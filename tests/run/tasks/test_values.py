"""Values of files and other runs: patching, ablation, steering, by sample, module and part, from configuration only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.store.reader import Run

BASE = ("model=mlp", "data.batch_size=50", "train.limit_batches=2", "task=predict")
SEEN = "+hooks.seen={select: [layers.1,layers.3,fc], hook: forward, action: capture}"
BETWEEN = "+hooks.between={select: [layers.1,layers.3,fc], hook: forward, action: capture}"
BEFORE = "+hooks.before={select: layers.1, hook: forward, action: capture, priority: -1}"
AFTER = "+hooks.after={select: [layers.1,layers.3,fc], hook: forward, action: capture, priority: 1}"


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file with two tensors `a` and `b` of shape [3, 4, 5]."""
    torch.manual_seed(0)
    save_file({"a": torch.randn(3, 4, 5), "b": torch.randn(3, 4, 5)}, tmp_path / "v.safetensors")
    return str(tmp_path / "v.safetensors")


def test_a_value_of_a_file_takes_a_factor(file: str) -> None:
    (a, b), x = tensors(file), torch.randn(2, 3, 4, 5)
    forms: dict[str, tuple[dict[str, Any], Tensor]] = {
        "minus and both factors": (
            {"key": "a", "factor": 0.5, "minus": {"key": "b", "factor": 3}},
            (a - 3 * b) / 2,
        ),
        "index of both": (
            {"key": "a", "index": "..., [0]", "minus": {"key": "b"}},
            a[..., [0]] - b[..., [0]],
        ),
        "an index for each": (
            {"key": "a", "index": "1", "minus": {"file": file, "key": "b", "index": 2}},
            a[1] - b[2],
        ),
    }
    for name, (keys, expected) in forms.items():
        value = {"file": file, **keys}
        found, gradient = edited(x, action="add_bias", value=value)
        assert_close(found, x + expected, msg=name)
        assert_close(gradient, 2 * (x + expected), msg=name)


@pytest.mark.parametrize(
    "index", ["..., [1, 3]", ":, [2, -3]", ":, 1", ":, 0:2, ..., 4", "[1, 0]", "1, ..., [0, 3], :"]
)
def test_at_same_reads_the_part_that_index_selects(file: str, index: str) -> None:
    """For every action: the part is that of the whole edit, the rest and its gradient are unchanged."""
    items = eval(f"np.s_[{index}]", {"np": np})  # the text as NumPy indexes
    a = tensors(file)[0]
    x = torch.randn(2, 3, 4, 5)
    value = {"file": file, "key": "a", "at": "same"}
    edits: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
        "replace": ({"value": value}, lambda x: a.expand_as(x)),
        "add_bias": ({"value": value}, lambda x: x + a),
        "scale": ({"factor": value}, lambda x: x * a),
        "clamp": ({"min": value, "max": 9}, lambda x: x.clamp(a.expand_as(x), torch.tensor(9.0))),
    }
    for action, (keys, change) in edits.items():

        def expected(x: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            mask = torch.zeros_like(x, dtype=torch.bool)
            mask[items] = True
            return torch.where(mask, change(x), x)

        found = edited(x, action=action, index=index, **keys)
        wanted = by_hand(x, expected)
        assert_close(found, wanted, msg=f"{action} {index}")


def test_at_same_with_infinite_values_elsewhere_gives_no_nan(tmp_path: Path) -> None:
    """Only the part is computed: 0 * inf outside of it would make its gradient NaN."""
    save_file({"a": torch.tensor([2.0, -torch.inf])}, tmp_path / "v.safetensors")
    value = {"file": str(tmp_path / "v.safetensors"), "at": "same"}
    found, gradient = edited(torch.ones(3, 2), action="scale", factor=value, index="..., 0")
    assert found.tolist() == [[2, 1]] * 3
    assert gradient.tolist() == [[8, 2]] * 3


def test_a_value_of_the_whole_names_at_same(file: str) -> None:
    x = torch.randn(2, 3, 4, 5)
    whole = {"action": "replace", "value": {"file": file, "key": "a"}}
    with pytest.raises(
        hookrun.HookrunError, match="; if it is of the whole tensor, add at: same to the value"
    ):
        edited(x, index="..., 0:2", **whole)
    with pytest.raises(hookrun.HookrunError) as without_part:
        edited(x[:, :, :3], **whole)
    assert "does not broadcast" in str(without_part.value)
    assert "at: same" not in str(without_part.value)


def test_bounds_may_differ_by_channel() -> None:
    x = torch.randn(2, 3, 4, 4)
    low = torch.tensor([-1.0, -0.5, 0]).view(3, 1, 1)
    high = torch.tensor([0.2, 0.5, 1]).view(3, 1, 1)
    nested = [each.tolist() for each in (low, high)]
    found = edited(x, action="clamp", min=nested[0], max=nested[1])
    assert_close(found, by_hand(x, lambda x: torch.where(x < low, low, torch.where(x > high, high, x))))
    found = edited(x, action="clamp", max=nested[1])
    assert_close(found, by_hand(x, lambda x: torch.where(x > high, high, x)))
    found = edited(x, action="scale", factor=nested[1])
    assert_close(found, by_hand(x, lambda x: x * high))
    half = edited(x.half() * 1e4, action="clamp", min=[-1e6], max=[1e300])[0]
    assert torch.equal(half, (x.half() * 1e4)), "a bound beyond the dtype bounds nothing finite"
    for keys, said in {
        "min: [1, 2, 3], max: [2, 1, 4]": "min 2.0 is greater than max 1.0",
        "min: [[1], [5]], max: 3": "min 5.0 is greater than max 3.0",
        "min: [1, 2], max: [1, 2, 3]": r"min has shape \[2\] where max has \[3\]",
        "min: [1, .nan]": "found nan",
    }.items():
        with pytest.raises(hookrun.SpecError, match=said):
            hookrun.load_spec(
                {"h": {"select": "0", "hook": "forward", "action": "clamp", **yaml.safe_load(f"{{{keys}}}")}}
            )
    with pytest.raises(hookrun.CompileError, match=r"nest the list to shape \[3, 1, 1\]: \[\[\[a"):
        edited(x, action="scale", factor=[1, 2, 3])


def test_calls_in_threads_do_not_affect_each_other(file: str) -> None:
    """The state of one call does not affect another; and a compiled graph has the same results."""
    a = tensors(file)[0]
    model = nn.Sequential(nn.Identity())
    value = {"file": file, "key": "a", "at": "same"}
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "index": ":, [0, 2]", "factor": value}}
    wrong = list[str]()

    def loop(batch: int) -> None:
        for _ in range(50):
            x = torch.randn(batch, 3, 4, 5)
            expected = x.clone()
            expected[:, [0, 2]] *= a[[0, 2]]
            if not torch.equal(model(x), expected):
                wrong.append(f"batch {batch}")

    with hookrun.hooked(model, spec) as hooks:
        running = [threading.Thread(target=loop, args=(batch,)) for batch in range(1, 5)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        assert not wrong
        assert hooks.fired["h", "0"] == 50 * 4
        x = torch.randn(2, 3, 4, 5)
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


# ---- from runs


@pytest.fixture
def clean(shared: Any) -> Run:
    """A run whose activations others use: 100 samples of the validation split."""
    return shared(*BASE, SEEN)


@pytest.fixture
def other(shared: Any) -> Run:
    """The same captures of a model of another seed."""
    return shared(*BASE, SEEN, "seed=1")


def patch(run: Run, keys: str = "", hook: str = "select: layers.1", action: str = "replace") -> str:
    """An override that changes what a layer returns by what another run has captured there."""
    name = {"scale": "factor"}.get(action, "value")
    value = f"{{run: '{run.path}', capture: seen{', ' if keys else ''}{keys}}}"
    return f"+hooks.patch={{{hook}, hook: forward, action: {action}, {name}: {value}}}"


def test_each_module_takes_its_own_rows(executed: Any, refused: Any, clean: Run, capsys: Any) -> None:
    select = "select: [layers.1,fc,layers.3]"
    mean = patch(clean, "", select).replace("hooks.patch", "hooks.mean")
    found = executed(*BASE, "seed=5", patch(clean, "sample: same, factor: 2.0", select), BETWEEN, mean, AFTER)
    for module in ("layers.1", "layers.3", "fc"):
        assert_close(found.captures["between"][module][:], 2 * clean.captures["seen"][module][:])
    said = capsys.readouterr().out
    assert "patch.value: one for each of 3 modules, 552 B per sample: layers.1 [64] 256 B" in said
    assert_close(found.captures["after"]["fc"][3], clean.captures["seen"]["fc"][:].mean(0))
    said = refused(*BASE, patch(clean, "", "select: [layers.0,layers.2,fc]"))
    assert "layers.0, layers.2 was not captured by 'seen' in" in said
    assert "which holds layers.1, layers.3, fc; name one for all with `module`, or narrow `select`" in said


def test_one_channel_of_the_row_of_each_sample(executed: Any, clean: Run) -> None:
    """Found by `at: same`; then all is zero, and the same channels are picked by `index`."""
    hook = "select: layers.1, index: '..., [1,5,6]'"
    zero = "+hooks.zero={select: layers.1, hook: forward, action: replace, value: 0}"
    picked = patch(clean, "sample: same, index: '[1,5,6]'", hook).replace("hooks.patch", "hooks.pick")
    own = SEEN.replace("hooks.seen", "hooks.own")
    found = executed(
        *BASE, "seed=5", own, patch(clean, "sample: same, at: same", hook), BETWEEN, zero, picked, AFTER
    )
    expected = found.captures["own"]["layers.1"][:]
    theirs = clean.captures["seen"]["layers.1"][:]
    assert not torch.allclose(expected, theirs)
    for name in ("between", "after"):
        expected[:, [1, 5, 6]] = theirs[:, [1, 5, 6]]
        assert_close(found.captures[name]["layers.1"][:], expected)
        expected = torch.zeros_like(theirs)


def test_rows_by_sample_take_an_index(executed: Any, refused: Any, clean: Run) -> None:
    hook = "select: layers.1, index: '[1,0]'"
    said = refused(*BASE, "data.batch_size=2", "train.limit_batches=1", patch(clean, "sample: same", hook))
    assert "`index` picks rows of the batch" in said
    found = executed(
        *BASE, "seed=5", "train.limit_batches=1", patch(clean, "sample: same, at: same", hook), AFTER
    )
    own = found.captures["after"]["layers.1"]
    theirs = clean.captures["seen"]["layers.1"]
    assert_close(own[:2], theirs[:2])
    assert not torch.allclose(own[2], theirs[2])


def test_mistakes_in_a_value_are_reported(refused: Any, clean: Run, tmp_path: Path) -> None:
    save_file({"k": torch.ones(4)}, tmp_path / "v.safetensors")
    for keys, said in {
        "at: same": "the hook has no `index`",
        "module: fc, index: '[0, 12]'": "index [0, 12] of the value, which has shape [10]: index 12 is out of bounds",
        "module: fc, factor: [1]": "hooks.patch.value.factor: found [1]",
        "module: fc, minus: {file: v.safetensors}": "minus: v.safetensors has shape [4]",
        "module: fc, minus: {at: same}": "`at` belongs beside `minus`",
        "module: layers.4": "hooks.patch.value: no module 'layers.4' in the captures of 'seen': did you",
        "modul: fc": "modul: unknown key\n      did you mean 'module'",
        "sample: sam": "sample: found 'sam', expected mean, same",
        "minus: 3": "minus: found 3, expected a mapping such",
    }.items():
        found = refused(*BASE, patch(clean, keys, "select: fc"))
        assert said in found, keys
        assert found.startswith("1 co"), keys
    wrong = patch(clean, "", "select: fc").replace("{run: ", "{rnu: ").replace(", capture: seen", "")
    assert "hooks.patch.value: found the keys rnu, expected `file`, `run`" in refused(*BASE, wrong)


def test_rows_of_one_token_are_written_at_their_token(executed: Any) -> None:
    model = ("model=decoder", "model.args.width=16", "model.args.layers=1", "model.args.heads=2")
    # as many samples as tokens, so that a mix-up would not be a shape error
    sizes = ("data.args.val_size=15", "data.batch_size=15")
    place = "select: blocks.0.attn.z, hook: forward, tokens: -1"
    base = (*model, "data=names", *sizes)
    clean = executed("task=predict", *base, f"+hooks.seen={{{place}, action: capture}}")
    value = f"value: {{run: '{clean.path}', capture: seen, sample: SAMPLE, at: same}}, heads: [1]"
    hook = f"+hooks.put={{{place}, action: replace, {value}}}"
    task = ("task=evaluate", *base, "task.metrics=[kl]")
    assert executed(*task, hook.replace("SAMPLE", "same")).metrics[-1]["kl"] < 1e-9
    assert executed(*task, hook.replace("SAMPLE", "resample")).metrics[-1]["kl"] > 1e-9
    places = place.replace("-1", "'1:'")
    value = f"{{run: '{clean.path}', capture: seen, sample: same}}"
    edit = f"+hooks.put={{{places}, action: replace, value: {value}}}"
    after = f"+hooks.after={{{places}, action: capture, priority: 1}}"
    rows = executed("task=predict", *base, edit, after).captures["after"]["blocks.0.attn.z"]
    assert set(rows.sample_ids.bincount().tolist()) == {13, 14}  # several, not as many for each sample
    assert_close(rows[:], clean.captures["seen"]["blocks.0.attn.z"][:][rows.sample_ids])


def test_sample_n_of_one_file_is_that_of_the_other(executed: Any, tmp_path: Path, capsys: Any) -> None:
    """Sample n of one file corresponds to sample n of the other, in any batches; the plan notes the other file."""
    x = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
    save_file({"x": x, "y": torch.arange(90) % 3}, tmp_path / "clean.safetensors")
    save_file({"x": -x.roll(1, 0), "y": torch.arange(90) % 3}, tmp_path / "corrupted.safetensors")
    columns = "data.args={file: %s.safetensors, input: x, target: y, num_classes: 3}"
    of = [("data=tensors", "model=mlp", "task=predict", columns % name) for name in ("clean", "corrupted")]
    clean = executed(*of[0], SEEN)
    capsys.readouterr()
    patched = executed(*of[1], "data.batch_size=5", BEFORE, patch(clean, "sample: same"))
    assert_close(patched.predictions[:], clean.predictions[:])
    broken = patched.captures["before"]["layers.1"][:]
    assert not torch.allclose(broken, clean.captures["seen"]["layers.1"][:], atol=0.01)
    assert f"NOTE: values come from {clean.path}, where data.args.file is " in capsys.readouterr().out


MEANS = {"mean": "", "mean_named": ", sample: mean", "mean_reduced": ", reduce: mean"}


@pytest.fixture
def ablated(shared: Any, clean: Run, other: Run) -> Callable[..., Tensor]:
    """What layers.1 returned after each of several edits, which one run makes one after another."""
    of = f"run: '{clean.path}', capture: seen, module: layers.1"
    actions = {"steered": f"add_bias, value: {{{of}, minus: {{run: '{other.path}'}}}}"}
    actions |= {name: f"replace, value: {{{of}{keys}}}" for name, keys in MEANS.items()}
    actions["drawn"] = f"replace, value: {{{of}, sample: resample}}"
    typed = []
    for name, action in actions.items():
        typed.append(f"+hooks.edit_{name}={{select: layers.1, hook: forward, action: {action}}}")
        typed.append(f"+hooks.{name}={{select: layers.1, hook: forward, action: capture}}")

    def ablated(name: str, *more: str) -> Tensor:
        found: Tensor = shared(*BASE, *typed, *more).captures[name]["layers.1"][:]
        return found

    return ablated


@pytest.mark.parametrize("name", MEANS)
def test_mean_ablation(ablated: Any, clean: Run, name: str) -> None:
    mean = clean.captures["seen"]["layers.1"][:].mean(0)
    assert_close(ablated(name), mean.expand(100, -1))


def test_resample_ablation_gives_each_sample_another_one_s_value(ablated: Any, clean: Run) -> None:
    own = clean.captures["seen"]["layers.1"][:]
    drawn = ablated("drawn")
    nearest = torch.cdist(drawn, own).argmin(1)
    assert_close(drawn, own[nearest])
    assert not (nearest == torch.arange(len(own))).any()
    assert len(nearest.unique()) > 40
    again = ablated("drawn", "data.workers=0")
    assert torch.equal(again, drawn), "with the same seed the same draws"


def test_steering_by_the_difference_of_two_runs_means(ablated: Any, clean: Run, other: Run) -> None:
    means = [found.captures["seen"]["layers.1"][:].mean(0) for found in (clean, other)]
    expected = clean.captures["seen"]["layers.1"][:] + means[0] - means[1]
    assert_close(ablated("steered"), expected, rtol=1e-4, atol=1e-5)


# ---- mistakes are found before the run


def test_samples_without_a_row(clean: Run, refused: Any, ready: Any) -> None:
    said = refused(*BASE, "train.limit_batches=null", patch(clean, "sample: same"))
    assert "hooks.patch.value: seen/layers.1 of the run" in said
    assert "has no row of sample 100, 101, 102, 103, …: it has 100 samples from 0 to 99" in said
    ready(*BASE, patch(clean, "sample: same"))


def test_validation_has_no_rows_of_the_training_samples(executed: Any, ready: Any, refused: Any) -> None:
    train = executed(*BASE[:2], "task=predict", "task.split=train", SEEN)
    assert "add when: {mode: train}" in refused(*BASE[:2], patch(train, "sample: same"))
    when = patch(train, "sample: same").replace("action: replace", "action: replace, when: {mode: train}")
    ready(*BASE[:2], when)


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
    said = refused(*BASE[:3], f"+hooks.p={{{body}, value: {value}}}")
    assert "a value for each sample goes with hooks that see a batch of samples" in said


# ---- in memory


def spec_of(run: Run, sample: Any) -> dict[str, Any]:
    value = {"run": str(run.path), "capture": "seen", "module": "fc", "sample": sample}
    return {"p": {"select": "", "hook": "forward", "action": "replace", "value": value}}


def test_in_a_user_s_own_loop_the_samples_are_named(clean: Run) -> None:
    model = nn.Linear(3, 10)
    ids = [5, 30, 7]
    with hookrun.hooked(model, spec_of(clean, "same")) as hooks:
        hooks.samples = ids
        found = model(torch.ones(3, 3))
    assert_close(found, clean.captures["seen"]["fc"][ids])


def test_values_by_sample_need_names_that_fit(clean: Run) -> None:
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


def test_resampled_rows_survive_checkpointing(clean: Run) -> None:
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


def tensors(file: str) -> tuple[Tensor, Tensor]:
    found = load_file(file)
    return found["a"], found["b"]


def edited(x: Tensor, **keys: Any) -> tuple[Tensor, Tensor]:
    """The output of an identity under a forward hook, and the gradient of the sum of its squares for x."""
    x = x.clone().requires_grad_()
    model = nn.Sequential(nn.Identity())
    spec = {"h": {"select": "0", "hook": "forward", **keys}}
    hookrun.compile(spec, model, example=((x,), {}))
    with hookrun.hooked(model, spec):
        out = model(x)
        out.square().sum().backward()
    return out.detach(), x.grad


def by_hand(x: Tensor, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = change(x)
    out.square().sum().backward()
    return out.detach(), x.grad
