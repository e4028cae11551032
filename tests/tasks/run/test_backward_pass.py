"""task.backward: gradients of a score without training, a row per sample, equal to autograd's for the sample alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from hookrun.compose.compose import compose_dict
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.run.batches import Batches

FEW = ("task=predict", "data.batch_size=3", "train.limit_batches=2")
SEE = {
    "acts": "{select: conv2, hook: forward, action: capture}",
    "grads": "{select: conv2, hook: output_grad, action: capture}",
    "pixels": "{select: '', hook: backward, action: capture, target: 'grad_input[0]'}",
    "weights": "{select: fc.weight, hook: grad, action: capture}",
}
HOOKS = [f"+hooks.{name}={body}" for name, body in SEE.items()]
SCORES = {
    "{score: label}": lambda logits, label: logits[0, label],
    "{score: top}": lambda logits, label: logits[0].max(),
    "{score: class, class: 3}": lambda logits, label: logits[0, 3],
    "{score: output}": lambda logits, label: logits.sum(),
    "{score: loss}": lambda logits, label: F.cross_entropy(logits, label),
}


def plain(task: str = "predict") -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The model in evaluation mode, and the samples one by one."""
    small = ("compute.device=cpu", "compute.threads=1")
    prepared: Any = prepare(parse_experiment(compose_dict([*small, *FEW])))
    batches = list(Batches(prepared, "val").epoch(0))
    one_by_one = [
        (batch.inputs[n : n + 1], batch.target[n : n + 1]) for batch in batches for n in range(len(batch.ids))
    ]
    return prepared.model.eval(), one_by_one


@pytest.mark.parametrize("score", SCORES)
def test_each_row_is_the_gradient_for_its_sample_alone(run, score: str) -> None:
    found = run(*FEW, *HOOKS, f"task.backward={score}")
    model, samples = plain()
    in_all = torch.zeros_like(model.fc.weight)
    for number, (pixels, label) in enumerate(samples):
        image = pixels.clone().requires_grad_()
        kept: list[torch.Tensor] = []
        handle = model.conv2.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out))
        logits = model(image)
        handle.remove()
        total = SCORES[score](logits, label).sum()
        inputs = [kept[0], image, model.fc.weight]
        grads, saliency, weight = torch.autograd.grad(total, inputs)
        in_all += weight
        torch.testing.assert_close(found.captures["grads"]["conv2"][number], grads[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.captures["pixels"][""][number], saliency[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.captures["acts"]["conv2"][number], kept[0][0])
    for name in ("grads", "acts"):
        assert found.captures[name]["conv2"].sample_ids.tolist() == list(range(6)), "in the data's order"
    rows = found.captures["weights"]["fc.weight"]
    assert rows.shape == (2, 10, 512) and rows.sample_ids.tolist() == [-1, -1], "one for each batch"
    torch.testing.assert_close(rows[:].sum(0), in_all, rtol=1e-4, atol=1e-5)


def test_predictions_and_losses_do_not_change_and_nothing_is_trained(run) -> None:
    without, backward = run(*FEW), run(*FEW, "task.backward={score: top}", *HOOKS)
    assert torch.equal(without.predictions[:], backward.predictions[:])
    evaluate = ("task=evaluate", "train.limit_batches=2")
    losses = [run(*evaluate, *more).metrics for more in ((), ("task.backward={score: loss}",))]
    assert losses[0] == losses[1]


def test_an_edit_of_the_gradient_changes_upstream_gradients(run) -> None:
    scores = ("task.backward={score: label}", *HOOKS[1:3])
    double = "+hooks.double={select: relu2, hook: output_grad, action: scale, factor: 2}"
    one, two = run(*FEW, *scores), run(*FEW, *scores, double)
    for name, path in (("grads", "conv2"), ("pixels", "")):
        assert one.captures[name][path][:].abs().max() > 0
        torch.testing.assert_close(two.captures[name][path][:], 2 * one.captures[name][path][:])


def test_a_compiled_model_and_mixed_precision(run) -> None:
    """Inside a graph output_grad edits, and parameters are captured outside of it."""
    double = "+hooks.double={select: relu2, hook: output_grad, action: scale, factor: 2}"
    seen = "+hooks.seen={select: conv1.weight, hook: grad, action: capture}"
    base = (*FEW, "task.backward={score: top}", double, seen)
    plain, compiled, half = (
        run(*base),
        run(*base, "compute.compile=true"),
        run(*base, "compute.precision=bf16"),
    )
    expected = plain.captures["seen"]["conv1.weight"][:]
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(compiled.captures["seen"]["conv1.weight"][:], expected, rtol=1e-3, atol=1e-4)
    difference = half.captures["seen"]["conv1.weight"][:] - expected
    assert difference.norm() < 0.1 * expected.norm()


def test_a_frozen_model_still_has_the_gradient_of_its_input(run, hook) -> None:
    freeze = "+hooks.freeze={select: '', hook: apply, action: freeze}"
    same = "task.backward={score: top}"
    frozen, free = run(*FEW, same, HOOKS[2], freeze), run(*FEW, same, HOOKS[2])
    assert torch.equal(frozen.captures["pixels"][""][:], free.captures["pixels"][""][:])


def test_an_output_that_is_not_scores_of_classes_is_refused(refused, own_model) -> None:
    maps = "    def forward(self, x):\n        return x * self.weight\n"
    body = "def __init__(self):\n    super().__init__()\n    self.weight = nn.Parameter(torch.ones(()))\n"
    own = own_model(body + maps.replace("    def", "def").replace("        return", "    return"))
    said = refused("task=predict", "task.backward={score: top}", *own)
    assert "'top' needs an output [batch, classes], and the model returned [2, 1, 8, 8]" in said


def test_integer_inputs_and_a_frozen_model_have_no_gradient(refused, own_model, tmp_path) -> None:
    save_file({"x": torch.randint(0, 9, (8, 5))}, tmp_path / "x.safetensors")
    body = """
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 4).requires_grad_(False)

        def forward(self, x):
            return self.words(x).mean(1)
    """
    data = ("data=tensors", "data.args.file=x.safetensors", "data.args.input=x", "data.args.target=null")
    said = refused("task=predict", "task.backward={score: top}", *own_model(body), *data)
    assert "task.backward: the score requires no gradient" in said


def test_scores_without_a_gradient_are_refused_before_the_run(refused, tmp_path) -> None:
    save_file({"x": torch.zeros(8, 5), "t": torch.randint(0, 9, (8, 5))}, tmp_path / "x.safetensors")
    own = (
        "model=mlp",
        "model.args.num_classes=3",
        "data=tensors",
        "data.args.file=x.safetensors",
        "data.args.input=x",
        "data.args.target=null",
    )

    def said(backward: str, *more: str) -> str:
        return refused("task=predict", f"task.backward={backward}", *more)

    assert "task.backward.class: found 10, and the model has 10 classes" in said("{score: class, class: 10}")
    assert "`class: NUMBER` goes with `score: class`" in said("{score: class}")
    assert "`class: NUMBER` goes with `score: class`" in said("{score: top, class: 1}")
    assert "task.backward.class: found -1" in said("{score: class, class: -1}")
    assert "did you mean 'label'?" in said("{score: lable}")
    assert "the data 'tensors' has no targets" in said("{score: label}", *own)
    assert "train.loss: 'cross_entropy' needs targets" in said("{score: loss}", *own)
    assert "model returns one for the batch" in said("{score: loss}", "train.loss=output")


def test_the_lines_beside_the_plan(run, capsys, refused) -> None:
    step = "+hooks.step={select: fc.weight, hook: optimizer_step_pre, action: print}"
    run(*FEW, "task.backward={score: class, class: 3}", HOOKS[3], step)
    said = capsys.readouterr().out
    assert "one backward pass for each batch, from the logit of class 3 summed over its samples" in said
    assert "NOTE: step: optimizer_step_pre needs an optimizer step, which task=predict does not make" in said
    assert "NOTE: weights: the gradient of a parameter is one for each batch" in said
    run(*FEW, "task.backward={score: top}", "compute.precision=fp16")
    said = capsys.readouterr().out
    assert "NOTE: task.backward: no hook sees its gradients" in said
    assert "NOTE: task.backward: without a gradient scaler fp16 gradients below 6e-8 are 0" in said
    assert "set task.backward, use task=train" in refused(*FEW, HOOKS[1], "strict=true")
