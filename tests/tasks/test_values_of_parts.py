"""Values with `factor`, `index`, `minus`, `at: same`; values by module; bounds by channel: against plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun
from hookrun.store.reader import Run

BASE = ("model=mlp", "data.batch_size=50", "train.limit_batches=2", "task=predict")
SEEN = "+hooks.seen={select: [layers.1,layers.3,fc], hook: forward, action: capture}"
BETWEEN = "+hooks.between={select: [layers.1,layers.3,fc], hook: forward, action: capture}"
AFTER = "+hooks.after={select: [layers.1,layers.3,fc], hook: forward, action: capture, priority: 1}"


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file with two tensors `a` and `b` of shape [3, 4, 5]."""
    torch.manual_seed(0)
    save_file({"a": torch.randn(3, 4, 5), "b": torch.randn(3, 4, 5)}, tmp_path / "v.safetensors")
    return str(tmp_path / "v.safetensors")


def tensors(file: str) -> tuple[Tensor, Tensor]:
    from safetensors.torch import load_file

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


def test_factor_index_and_minus_of_a_file(file: str) -> None:
    (a, b), x = tensors(file), torch.randn(2, 3, 4, 5)
    forms: dict[str, tuple[dict[str, Any], Tensor]] = {
        "factor": ({"key": "a", "factor": -2}, -2 * a),
        "minus": ({"key": "a", "minus": {"key": "b"}}, a - b),
        "minus and both factors": (
            {"key": "a", "factor": 0.5, "minus": {"key": "b", "factor": 3}},
            (a - 3 * b) / 2,
        ),
        "index": ({"key": "a", "index": "0"}, a[0]),
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
    a, x = tensors(file)[0], torch.randn(2, 3, 4, 5)
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

        found, wanted = edited(x, action=action, index=index, **keys), by_hand(x, expected)
        assert_close(found, wanted, msg=f"{action} {index}")


def test_at_same_with_infinite_values_elsewhere_gives_no_nan(tmp_path: Path) -> None:
    """Only the part is computed: 0 * inf outside of it would make its gradient NaN."""
    save_file({"a": torch.tensor([2.0, -torch.inf])}, tmp_path / "v.safetensors")
    value = {"file": str(tmp_path / "v.safetensors"), "at": "same"}
    found, gradient = edited(torch.ones(3, 2), action="scale", factor=value, index="..., 0")
    assert found.tolist() == [[2, 1]] * 3 and gradient.tolist() == [[8, 2]] * 3


def test_bounds_and_factors_by_channel() -> None:
    x = torch.randn(2, 3, 4, 4)
    low, high = torch.tensor([-1.0, -0.5, 0]).view(3, 1, 1), torch.tensor([0.2, 0.5, 1]).view(3, 1, 1)
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


def test_a_captured_list_has_its_own_memory() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.randn(4, 100, 50)
    with hookrun.hooked(
        model, {"h": {"select": "0", "hook": "forward", "action": "capture", "index": "..., [3, 1]"}}
    ) as hooks:
        model(x)
    (found,) = hooks.captures["h"]["0"]
    assert torch.equal(found, x[..., [3, 1]])
    assert found.untyped_storage().nbytes() == 4 * 100 * 2 * 4


def test_a_list_beyond_the_tensor_is_found_before_the_run() -> None:
    """On an accelerator there would be no other error message."""
    for index, said in {
        "..., [1, 9]": "index 9 is out of bounds for dimension 1 with size 5",
        ":, [4, -1]": "selects a position of dimension 1 twice",
        ":, :, [0]": "too many indices",
    }.items():
        with pytest.raises(hookrun.CompileError, match=said):
            edited(torch.ones(2, 5), action="scale", factor=2, index=index)
    with pytest.raises(hookrun.CompileError, match="samples out of order"):
        edited(torch.ones(2, 5), action="capture", index="[1, 0]")


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_and_graphs(file: str, threads: int) -> None:
    """The state of one call does not affect another; and a compiled graph has the same results."""
    a = tensors(file)[0]
    model = nn.Sequential(nn.Identity())
    value = {"file": file, "key": "a", "at": "same"}
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "index": ":, [0, 2]", "factor": value}}
    wrong = list[str]()

    def loop(batch: int) -> None:
        for _ in range(50 if threads > 1 else 1):
            x = torch.randn(batch, 3, 4, 5)
            expected = x.clone()
            expected[:, [0, 2]] *= a[[0, 2]]
            if not torch.equal(model(x), expected):
                wrong.append(f"batch {batch}")

    with hookrun.hooked(model, spec) as hooks:
        running = [threading.Thread(target=loop, args=(batch,)) for batch in range(1, threads + 1)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        assert not wrong
        assert hooks.fired["h", "0"] == (50 * threads if threads > 1 else 1)
        if threads == 1:
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            x = torch.randn(2, 3, 4, 5)
            assert torch.equal(compiled(x), model(x))


# ---- from runs


@pytest.fixture
def clean(shared: Any) -> Run:
    return shared(*BASE, SEEN)


def patch(run: Run, keys: str = "", hook: str = "select: '**'", action: str = "replace") -> str:
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
    expected, theirs = found.captures["own"]["layers.1"][:], clean.captures["seen"]["layers.1"][:]
    assert not torch.allclose(expected, theirs)
    for name in ("between", "after"):
        expected[:, [1, 5, 6]] = theirs[:, [1, 5, 6]]
        assert_close(found.captures[name]["layers.1"][:], expected)
        expected = torch.zeros_like(theirs)


def test_steering_strength_by_sample(run: Any, executed: Any, clean: Run) -> None:
    other = run(*BASE, SEEN, "seed=1")
    keys = f"module: layers.1, factor: 0.5, index: '0:4', sample: same, minus: {{run: '{other.path}', sample: same}}"
    found = executed(*BASE, patch(clean, keys, "select: layers.1, index: '..., 0:4'", "add_bias"), AFTER)
    a, b = (each.captures["seen"]["layers.1"][:] for each in (clean, other))
    expected = a.clone()
    expected[:, :4] += (a - b)[:, :4] / 2
    assert_close(found.captures["after"]["layers.1"][:], expected)


def test_rows_by_sample_and_an_index_into_the_batch(executed: Any, refused: Any, clean: Run) -> None:
    hook = "select: layers.1, index: '[1,0]'"
    said = refused(*BASE, "data.batch_size=2", "train.limit_batches=1", patch(clean, "sample: same", hook))
    assert "`index` picks rows of the batch" in said
    found = executed(
        *BASE, "seed=5", "train.limit_batches=1", patch(clean, "sample: same, at: same", hook), AFTER
    )
    own, theirs = found.captures["after"]["layers.1"], clean.captures["seen"]["layers.1"]
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
    }.items():
        assert said in refused(*BASE, patch(clean, keys, "select: fc")), keys


def test_rows_captured_at_one_token_are_written_at_the_token_of_their_sample(run: Any, executed: Any) -> None:
    model = ("model=decoder", "model.args.width=16", "model.args.layers=1", "model.args.heads=2")
    sizes = (
        "data.args.val_size=15",
        "data.batch_size=15",
    )  # as many samples as tokens, so that a mix-up would not be a shape error
    place = "select: blocks.0.attn.z, hook: forward, tokens: -1"
    base = (*model, "data=names", *sizes)
    clean = run("task=predict", *base, f"+hooks.seen={{{place}, action: capture}}")
    value = f"value: {{run: '{clean.path}', capture: seen, sample: SAMPLE, at: same}}, heads: [1]"
    hook = f"+hooks.put={{{place}, action: replace, {value}}}"
    task = ("task=evaluate", *base, "task.metrics=[kl]")
    assert executed(*task, hook.replace("SAMPLE", "same")).metrics[-1]["kl"] < 1e-9
    assert executed(*task, hook.replace("SAMPLE", "resample")).metrics[-1]["kl"] > 1e-9
