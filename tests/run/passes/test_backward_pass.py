"""task.backward: gradients of a score without training, a row per sample, equal to autograd's for the sample alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import hookrun
from hookrun.run.passes.backward_pass import Scoring
from hookrun.run.passes.batches import Batches
from hookrun.run.passes.context import RunContext

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


TOP = (*FEW, *HOOKS, "task.backward={score: top}", "task.metrics=[loss]")


@pytest.mark.parametrize("score", SCORES)
def test_a_score_is_the_sum_of_those_of_the_samples(ready, score: str) -> None:
    prepared = ready(*FEW, f"task.backward={score}")
    (batch, *_) = Batches(prepared, "val").epoch(0)
    output = prepared.model.eval()(batch.inputs)
    scoring = Scoring(prepared.task.backward, "task.backward", prepared.loss)
    one_by_one = [SCORES[score](output[n : n + 1], batch.target[n : n + 1]) for n in range(len(batch.ids))]
    torch.testing.assert_close(scoring(output, batch.target, batch), sum(map(torch.sum, one_by_one)))


def test_each_row_is_the_gradient_for_its_sample_alone(shared, ready) -> None:
    found = shared(*TOP)
    prepared = ready(*FEW)
    model = prepared.model.eval()
    batches = list(Batches(prepared, "val").epoch(0))
    in_all = torch.zeros_like(model.fc.weight)
    for number, pixels in enumerate(torch.cat([batch.inputs for batch in batches]).split(1)):
        image = pixels.clone().requires_grad_()
        kept: list[torch.Tensor] = []
        handle = model.conv2.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out))
        logits = model(image)
        handle.remove()
        inputs = [kept[0], image, model.fc.weight]
        grads, saliency, weight = torch.autograd.grad(logits.max(), inputs)
        in_all += weight
        torch.testing.assert_close(found.captures["grads"]["conv2"][number], grads[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.captures["pixels"][""][number], saliency[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.captures["acts"]["conv2"][number], kept[0][0])
    for name in ("grads", "acts"):
        assert found.captures[name]["conv2"].sample_ids.tolist() == list(range(6)), "in the data's order"
    rows = found.captures["weights"]["fc.weight"]
    assert rows.shape == (2, 10, 512)
    assert rows.sample_ids.tolist() == [-1, -1], "one for each batch"
    torch.testing.assert_close(rows[:].sum(0), in_all, rtol=1e-4, atol=1e-5)


def test_a_backward_pass_changes_no_predictions(shared, ready) -> None:
    backward = shared(*TOP)
    prepared = ready(*FEW)
    batches = list(Batches(prepared, "val").epoch(0))
    with torch.no_grad():
        outputs = [prepared.model.eval()(batch.inputs) for batch in batches]
    assert torch.equal(backward.predictions[:], torch.cat(outputs))
    evaluated = shared("task=evaluate", *FEW[1:], "task.backward={score: loss}")
    target = torch.cat([batch.target for batch in batches])
    for found in (backward, evaluated):
        assert found.metrics[-1]["loss"] == pytest.approx(F.cross_entropy(torch.cat(outputs), target).item())


@pytest.fixture
def seen(performed, tmp_path) -> Callable[..., torch.Tensor]:
    """What the hook `seen` captures in two batches with a backward pass from the highest score of each sample."""

    def perform(context: RunContext) -> None:
        context.prepared.task.perform(context)
        context.run_dir.set_status("done")

    def seen(name: str, hooks: dict[str, Any], **compute: Any) -> torch.Tensor:
        performed(
            perform, path=name, task={"name": "predict", "backward": {"score": "top"}}, model={"name": "cnn"},
            train={"limit_batches": 2}, compute=compute, hooks=hooks,
        )  # fmt: skip
        [capture] = hookrun.open_run(tmp_path / name).captures["seen"].values()
        return capture[:]

    return seen


UNLABELLED = "data.args={file: x.safetensors, input: x, target: null}"
DOUBLE = {"select": "relu2", "hook": "output_grad", "action": "scale", "factor": 2}
FREEZE = {"select": "", "hook": "apply", "action": "freeze"}
WEIGHT = {"select": "conv1.weight", "hook": "grad", "action": "capture"}
PIXELS = {"select": "", "hook": "backward", "action": "capture", "target": "grad_input[0]"}


def test_an_edit_of_the_gradient_changes_upstream_gradients(seen, monkeypatch) -> None:
    """Also inside a graph, where parameters are captured outside of it, and in mixed precision."""
    for name, hook in (("pixels", PIXELS), ("weight", WEIGHT)):
        one = seen(name, {"seen": hook})
        two = seen(f"double {name}", {"double": DOUBLE, "seen": hook})
        assert one.abs().max() > 0
        torch.testing.assert_close(two, 2 * one)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # no C++ compiler
    compiled = seen("compiled", {"double": DOUBLE, "seen": WEIGHT}, compile=True)
    torch.testing.assert_close(compiled, two, rtol=1e-3, atol=1e-4)
    half = seen("half", {"double": DOUBLE, "seen": WEIGHT}, precision="bf16")
    assert (half - two).norm() < 0.1 * two.norm()


def test_a_frozen_model_still_has_the_gradient_of_its_input(seen) -> None:
    frozen = seen("frozen", {"freeze": FREEZE, "seen": PIXELS})
    assert torch.equal(frozen, seen("trainable", {"seen": PIXELS}))


def test_an_output_that_is_not_scores_of_classes_is_refused(refused, own_model) -> None:
    maps = "    def forward(self, x):\n        return x * self.weight\n"
    body = "def __init__(self):\n    super().__init__()\n    self.weight = nn.Parameter(torch.ones(()))\n"
    own = own_model(body + maps.replace("    def", "def").replace("        return", "    return"))
    said = refused("task=predict", "task.backward={score: top}", *own)
    assert "'top' needs an output [batch, classes], and the model returned [2, 1, 8, 8]" in said


def test_integer_inputs_have_no_gradient(refused, own_model, tmp_path) -> None:
    save_file({"x": torch.randint(0, 9, (8, 5))}, tmp_path / "x.safetensors")
    body = """
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 4).requires_grad_(False)

        def forward(self, x):
            return self.words(x).mean(1)
    """
    said = refused("task=predict", "task.backward={score: top}", *own_model(body), "data=tensors", UNLABELLED)
    assert "task.backward: the score requires no gradient" in said


def test_scores_without_a_gradient_are_refused_before_the_run(refused, tmp_path) -> None:
    save_file({"x": torch.zeros(8, 5), "t": torch.randint(0, 9, (8, 5))}, tmp_path / "x.safetensors")
    own = ("model=mlp", "model.args.num_classes=3", "data=tensors", UNLABELLED)

    def said(backward: str, *more: str) -> str:
        return refused("task=predict", f"task.backward={backward}", *more)

    assert "task.backward.class: found 10, and the model has 10 classes" in said("{score: class, class: 10}")
    assert "`class: NUMBER` goes with `score: class`" in said("{score: class}")
    assert "`class: NUMBER` goes with `score: class`" in said("{score: top, class: 1}")
    assert "task.backward.class: found -1" in said("{score: class, class: -1}")
    assert "did you mean 'label'?" in said("{score: lable}")
    assert "the data 'tensors' has no targets" in said("{score: label}", *own)
    assert "train.loss: is not given, and the data 'tensors' has no targets" in said("{score: loss}", *own)
    assert "model returns one for the batch" in said("{score: loss}", "train.loss=output")


def test_the_lines_beside_the_plan(ready, refused) -> None:
    step = "+hooks.step={select: fc.weight, hook: optimizer_step_pre, action: print}"
    prepared = ready(*FEW, "task.backward={score: class, class: 3}", HOOKS[3], step)
    (line,) = prepared.lines
    assert "one backward pass for each batch, from the logit of class 3 summed over its samples" in line
    said = "\n".join(prepared.notes)
    assert "step: optimizer_step_pre needs an optimizer step, which task=predict does not make" in said
    assert "weights: the gradient of a parameter is one for each batch" in said
    said = "\n".join(ready(*FEW, "task.backward={score: top}", "compute.precision=fp16").notes)
    assert "task.backward: no hook sees its gradients" in said
    assert "task.backward: without a gradient scaler fp16 gradients below 6e-8 are 0" in said
    assert "set task.backward, use task=train" in refused(*FEW, HOOKS[1], "strict=true")
