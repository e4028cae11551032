"""predict and evaluate read a split in order; plan and modules print and write no files."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

import hookrun
from hookrun import data, models
from hookrun.data.settings import Data
from hookrun.models.settings import Model


def test_predictions_equal_a_hand_written_forward(executed, hook) -> None:
    see = hook(select="conv1", hook="forward", action="capture")
    found = executed("task=predict", "data.batch_size=50", see, "seed=3")
    samples = data.load(Data(name="digits"), "val", seed=3)
    images = torch.stack([samples[number][0] for number in range(len(samples))])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = models.build(Model(name="cnn"), sample_shape=(1, 8, 8), num_classes=10, trust=frozenset())
    with torch.no_grad():
        assert found.predictions is not None
        torch.testing.assert_close(found.predictions[:], model(images))
        torch.testing.assert_close(found.captures["h"]["conv1"][:], model.conv1(images))
    assert found.predictions.sample_ids.tolist() == list(range(len(samples)))
    assert found.metrics == [{"split": "val", "epoch": 0, "step": 0, "samples": len(samples)}]


def test_samples_of_the_train_split_may_be_chosen(executed, hook) -> None:
    entry = hook(select="fc", hook="forward", action="capture", keep="{reservoir: 9}")
    found = executed("task=predict", "task.split=train", "train.limit_batches=2", entry)
    assert found.predictions is not None
    assert found.predictions.sample_ids.tolist() == list(range(128))
    ids = found.captures["h"]["fc"].sample_ids
    assert len(ids) == 9
    assert ids.max() < 128


def test_data_without_targets_has_no_loss(executed, refused, tmp_path) -> None:
    save_file({"x": torch.rand(20, 1, 8, 8)}, tmp_path / "x.safetensors")
    own = ("data=tensors", "data.args={file: x.safetensors, input: x, target: null}")
    found = executed("task=predict", *own, "model.args.num_classes=3", "task.split=train")
    assert found.predictions is not None
    assert found.predictions.shape[1:] == (3,)
    evaluated = executed("task=evaluate", *own, "model.args.num_classes=3", "task.split=train")
    assert evaluated.metrics[-1]["samples"] == 16
    assert "loss" not in evaluated.metrics[-1]
    loss = "task.metrics=[loss]"
    assert "train.loss: is not given, and the data 'tensors' has no targets" in refused(
        "task=evaluate", *own, "model.args.num_classes=3", loss
    )


def test_evaluate_gives_the_mean_for_any_batch_size(executed) -> None:
    losses = [executed("task=evaluate", f"data.batch_size={size}").metrics[-1]["loss"] for size in (64, 7)]
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-5)


def test_a_run_continues_after_its_stdout_is_closed(tmp_path, warm) -> None:
    program = "import sys\nfrom hookrun.cli import main\nsys.exit(main())"
    argv = (
        "compute=cpu", "compute.threads=1", "hydra.run.dir=run", "train.epochs=1", "train.limit_batches=2",
    )  # fmt: skip
    reading, writing = os.pipe()
    process = warm.start(program, *argv, cwd=tmp_path, stdout=writing)
    os.close(writing)
    with open(reading) as printed:
        assert printed.readline()
    process.wait()
    assert hookrun.open_run(tmp_path / "run").status["status"] == "done"


CONTAINER = """
    class Pair(nn.Module):
        def forward(self, x):
            return x.sum(1), x[:, :3]

    def __init__(self):
        super().__init__()
        self.pair = self.Pair()

    def forward(self, x):
        first, second = self.pair(x.flatten(1))
        return {"logits": first, "aux": [second, None]}
"""


def test_containers_are_predicted_as_they_are(executed, own_model, hook) -> None:
    see = hook(select="pair", hook="forward", action="capture")
    found = executed(*own_model(CONTAINER), "task=predict", "train.limit_batches=2", see)
    samples = data.load(Data(name="digits"), "val", seed=0)
    images = torch.stack([samples[number][0] for number in range(128)]).flatten(1)
    predicted = found.predictions
    captured = found.captures["h"]["pair"]
    assert set(predicted) == {"logits", "aux[0]"}
    torch.testing.assert_close(predicted["logits"][:], images.sum(1))
    assert torch.equal(predicted["aux[0]"][:], images[:, :3])
    assert set(captured) == {"[0]", "[1]"}
    assert torch.equal(captured["[1]"][:], predicted["aux[0]"][:])
    assert captured["[0]"].sample_ids.tolist() == list(range(128))


@pytest.mark.parametrize(("model", "shape"), [("doubling", [5]), ("regression", []), ("pooling", [64, 1])])
def test_outputs_without_a_batch_dimension_are_stored_too(executed, model: str, shape: list[int]) -> None:
    found = executed(
        f"model=tutorial/{model}", "task=predict", "train.limit_batches=2", "data.batch_size=64"
    ).predictions
    assert found is not None
    if shape[:1] == [64]:
        assert found.shape == (128, 1)
        assert found.sample_ids.tolist() == list(range(128))
    else:
        assert list(found.shape) == [2, *shape], "one row for each batch"
        assert found.sample_ids.tolist() == [-1, -1]


def test_the_example_of_the_check_is_of_the_split_that_is_read(ready, hook) -> None:
    """Training has other transforms, and so another shape than validation."""
    see = hook(select="conv1", hook="forward", action="capture")
    crop = "data.train_transforms={center_crop: {size: 6}}"
    (planned,) = ready("task=predict", crop, see).plan.hooks
    (match,) = planned.matches
    assert match.shape == "[2, 32, 8, 8]"


def test_a_reduced_capture_is_stored(executed) -> None:
    """Each row belongs to one sample, for every reduction."""
    hooks = {
        "whole": "{select: relu2, hook: forward, action: capture}",
        "mean": "{select: relu2, hook: forward, action: capture, reduce: {mean: [2, 3]}}",
        "half": "{select: fc, hook: forward, action: capture, dtype: float16}",
        "fc": "{select: fc, hook: forward, action: capture}",
        "some": "{select: fc, hook: forward, action: capture, reduce: {topk: 3}}",
        "projected": "{select: flatten, hook: forward, action: capture, reduce: {project: 16}}",
    }
    found = executed("task=predict", *(f"+hooks.{name}={hook}" for name, hook in hooks.items())).captures
    whole = found["whole"]["relu2"][:]
    torch.testing.assert_close(found["mean"]["relu2"][:], whole.mean((2, 3)))
    assert found["half"]["fc"].dtype == torch.float16
    some = found["some"]["fc"]
    scores = found["fc"]["fc"][:]
    assert torch.equal(some["values"][:], scores.topk(3).values)
    assert torch.equal(some["indices"][:], scores.topk(3).indices)
    assert found["projected"]["flatten"].shape == (359, 16)
    assert found["projected"]["flatten"].sample_ids.tolist() == list(range(359))


def test_a_budget_of_bytes_ends_a_capture_with_a_note(executed, capsys) -> None:
    hook = "+hooks.h={select: [relu2,fc], hook: forward, action: capture, max_bytes: 2000000}"
    found = executed("task=predict", hook, "data.batch_size=50")
    per_batch = 50 * (128 * 4 * 4 + 10) * 4
    assert len(found.captures["h"]["fc"]) == 50 * (2_000_000 // per_batch)
    said = [
        line for line in capsys.readouterr().out.splitlines() if "max_bytes" in line and "used up" in line
    ]
    assert len(said) == 1
    assert said[0].startswith("h: its max_bytes are used up (")
    assert [line["spent"] for line in found.stats] == [2_000_000]


def test_some_samples_are_kept_under_their_own_numbers(executed) -> None:
    kept = {"all": "", "each": ", keep: {every: 40}", "drawn": ", keep: {reservoir: 9}"}
    captures = executed("task=predict", *(
        f"+hooks.{name}={{select: [relu2, fc], hook: forward, action: capture{keep}}}" for name, keep in kept.items()
    )).captures  # fmt: skip
    every = captures["all"]
    for name in ("each", "drawn"):
        some = captures[name]
        assert list(some) == list(every)
        assert len(some["fc"]) == 9
        for path, found in some.items():
            assert torch.equal(found[:], every[path][found.sample_ids]), path
        assert torch.equal(some["fc"].sample_ids, some["relu2"].sample_ids)
    assert captures["each"]["fc"].sample_ids.tolist() == list(range(0, 359, 40))


def test_shards_are_as_large_as_a_third_of_the_buffer(executed, hook) -> None:
    found = executed(
        "task=predict", "compute.capture_buffer=1", hook(select="relu2", hook="forward", action="capture")
    )
    sizes = sorted(path.stat().st_size for path in (found.path / "captures").glob("*.safetensors"))
    assert len(found.captures["h"]["relu2"]) == 359
    assert sum(sizes) > 359 * 128 * 16 * 4
    assert 2**20 / 4 < sizes[-1] <= 2**20 / 3  # a state also writes what is buffered
