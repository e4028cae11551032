"""`task.backward`: what is refused before the run, and the lines beside the plan."""

from __future__ import annotations

import torch

FEW = ("task=predict", "data.batch_size=3", "train.limit_batches=2")
GRADIENTS = "+hooks.grads={select: conv2, hook: output_grad, action: capture}"
WEIGHTS = "+hooks.weights={select: fc.weight, hook: grad, action: capture}"


def test_scores_without_a_gradient_are_refused_before_the_run(refused, tmp_path) -> None:
    from safetensors.torch import save_file

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
    assert "needs a class label of each sample, and the data 'tensors' has no targets" in said(
        "{score: label}", *own
    )
    assert "train.loss: 'cross_entropy' needs targets" in said("{score: loss}", *own)
    assert "task.backward: task=train has a backward pass of its own" in refused(
        "task=train", "+task.backward={score: top}"
    )
    assert "train.loss=output the model returns one for the batch" in said(
        "{score: loss}", "train.loss=output"
    )


def test_the_lines_beside_the_plan(run, capsys, refused) -> None:
    step = "+hooks.step={select: fc.weight, hook: optimizer_step_pre, action: print}"
    run(*FEW, "task.backward={score: class, class: 3}", WEIGHTS, step)
    said = capsys.readouterr().out
    assert "one backward pass for each batch, from the logit of class 3 summed over its samples" in said
    assert "NOTE: step: optimizer_step_pre needs an optimizer step, which task=predict does not make" in said
    assert "NOTE: weights: the gradient of a parameter is one for each batch" in said
    run(*FEW, "task.backward={score: top}", "compute.precision=fp16")
    said = capsys.readouterr().out
    assert "NOTE: task.backward: no hook sees its gradients" in said
    assert "NOTE: task.backward: without a gradient scaler fp16 gradients below 6e-8 are 0" in said
    assert "set task.backward, use task=train" in refused(*FEW, GRADIENTS, "strict=true")
