"""What the hook tutorials do by hand-written code, by configuration: their numbers in a training step."""

from __future__ import annotations

import pytest

A_STEP = ("seed=2", "train.steps=1", "train.limit_batches=1", "train.optimizer.name=SGD")
MODELS = {
    "doubling": ("model=tutorial/doubling", "train.loss=output_mean", *A_STEP),
    "regression": ("model=tutorial/regression", "train.loss=output", *A_STEP),
    "testnet": ("model=tutorial/testnet", "train.loss=output", *A_STEP),
}
W, TWICE_W = [-0.9064] * 5, [-1.8128] * 5
B = [-1.8891, 0.5235, 0.4592]
TWICE_B = [-3.7783, 1.0471, 0.9184]


def see(gradients: dict[str, list[float]]) -> list[str]:
    """Capture hooks on parameters, and on the outputs of modules (written ``y()``)."""
    kinds = {path: "output_grad" if path.endswith("()") else "post_accumulate_grad" for path in gradients}
    return [
        f"+hooks.see{number}={{select: {path.removesuffix('()')}, hook: {kind}, action: capture, priority: 9}}"
        for number, (path, kind) in enumerate(kinds.items())
    ]


@pytest.mark.parametrize(
    ("model", "hook", "gradients"),
    [
        ("doubling", None, {"b()": [0.2] * 5, "a": [0.4] * 5}),
        ("doubling", "{select: b, hook: output_grad, action: print, what: value}", {"a": [0.4] * 5}),
        ("doubling", "{select: b, hook: output_grad, action: scale, factor: 2}", {"a": [0.8] * 5}),
        ("regression", None, {"w": W, "b": B, "y()": B}),
        ("regression", "{select: loss, hook: output_grad, action: scale, factor: 2}", {"w": TWICE_W, "b": TWICE_B}),
        ("regression", "{select: w, hook: grad, action: scale, factor: 2}", {"w": TWICE_W, "b": B, "y()": B}),
        ("regression", "{select: '**', hook: grad, action: clamp, min: -1, max: 0}", {"w": W, "b": [-1, 0, 0]}),
        ("testnet", None, {"fc.bias": [-0.2] * 5}),
        ("testnet", "{select: fc.bias, hook: grad, action: replace, value: 0}", {"fc.bias": [0] * 5}),
    ],
)  # fmt: skip
def test_the_gradients_of_a_step(
    run, model: str, hook: str | None, gradients: dict[str, list[float]]
) -> None:
    edit = [] if hook is None else [f"+hooks.edit={hook}"]
    found = run(*MODELS[model], *edit, *see(gradients), "strict=true").captures
    for number, (path, values) in enumerate(gradients.items()):
        seen = found[f"see{number}"][path.removesuffix("()")]
        assert seen[0].tolist() == pytest.approx(values, abs=1e-4)


def test_doubling_the_gradient_of_the_loss_leaves_the_loss_alone(run) -> None:
    twice = "+hooks.edit={select: loss, hook: output_grad, action: scale, factor: 2}"
    losses = [run(*MODELS["regression"], *edit).metrics[0]["loss"] for edit in ([], [twice])]
    assert losses[0] == losses[1]


def test_the_printed_gradient_is_that_of_b(run, capsys) -> None:
    run(*MODELS["doubling"], "+hooks.p={select: b, hook: output_grad, action: print, what: value}")
    assert "p  b  value=[0.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "task"),
    [(name, "train") for name in ("doubling", "regression", "testnet", "add", "product", "functions")]
    + [("doubling", "evaluate")],
)
def test_networks_that_bring_their_own_data_have_a_loss_and_no_accuracy(run, model: str, task: str) -> None:
    loss = "output" if model in ("regression", "testnet") else "output_mean"
    settings = (f"train.loss={loss}", f"task={task}", "train.limit_batches=2", "train.epochs=1")
    found = run(f"model=tutorial/{model}", *settings)
    assert found.metrics and all("accuracy" not in line for line in found.metrics)
    assert all(isinstance(line["loss"], float) for line in found.metrics)
