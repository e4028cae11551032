"""The same hooks give the same results in Lightning, in transformers, in a loop by hand, and in hookrun's own run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset

import hookrun
from hookrun import data, models
from hookrun.cli import main
from hookrun.runtime import Installation
from hookrun.spec.experiment import Data, Model

EPOCHS, BATCHES, SIZE = 2, 6, 16

HOOKS: dict[str, dict[str, Any]] = {
    "clip": {"select": "layers.2", "hook": "grad", "action": "clamp", "min": -0.01, "max": 0.01},
    "norm": {"select": "**", "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 0.5},
    "soften": {
        "select": "layers.1", "hook": "output_grad", "action": "scale", "factor": 0.5,
        "when": {"step": {"start": 2, "every": 2}},
    },
    "limit": {"select": "layers.3", "hook": "forward", "action": "clamp", "max": 0.5, "when": {"epoch": [1]}},
    "halve": {"select": "fc", "hook": "post_accumulate_grad", "action": "scale", "factor": 0.5},
    "gradients": {"select": "**.weight", "hook": "post_accumulate_grad", "action": "capture"},
    "outputs": {"select": "layers.3", "hook": "forward", "action": "capture", "when": {"mode": "train"}},
    "norms": {"select": "layers.2.weight", "hook": "optimizer_step_post", "action": "stats", "of": ["norm"]},
}  # fmt: skip
"""Edits and observers of every kind of schedule."""


class Result:
    """The results of a loop: the weights, and the records of the hooks."""

    def __init__(self, weights: dict[str, Tensor], hooks: Installation) -> None:
        self.weights = weights
        self.gradients = {path: torch.stack(kept) for path, kept in hooks.captures["gradients"].items()}
        self.outputs = torch.cat(hooks.captures["outputs"]["layers.3"])
        self.norms = [(record["step"], record["epoch"], record["norm"]) for record in hooks.records]


def model() -> nn.Module:
    torch.manual_seed(0)
    args = {"hidden": [32, 32]}
    return models.build(
        Model(name="mlp", args=args), sample_shape=(1, 8, 8), num_classes=10, trust=frozenset()
    )


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """The first batches of hookrun's own run, in the same order."""

    def __init__(self) -> None:
        self._samples = data.load(Data(name="digits"), "train", seed=0)

    def __len__(self) -> int:
        return BATCHES * SIZE

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, label = self._samples[number][:2]
        return image, torch.as_tensor(label)


class NamedDigits(Digits):
    """The samples as mappings, which transformers needs."""

    def __getitem__(self, number: int) -> dict[str, Tensor]:  # type: ignore[override]
        image, label = super().__getitem__(number)
        return {"image": image, "label": label}


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


# ---- the loops


def by_hand(accumulate: int) -> Result:
    net = model()
    optimizer = sgd(net)
    with hookrun.hooked(net, HOOKS) as hooks:
        for _ in range(EPOCHS):
            for number, (images, labels) in enumerate(DataLoader(Digits(), batch_size=SIZE)):
                hooks.accumulating = (number + 1) % accumulate > 0
                (functional.cross_entropy(net(images), labels) / accumulate).backward()
                if not hooks.accumulating:
                    optimizer.step()
                    optimizer.zero_grad()
                    hooks.step()
            hooks.epoch()
    return Result(weights_of(net), hooks)


@contextmanager
def their_warnings() -> Iterator[None]:
    """Ignore the libraries' own warnings, and those about a machine without an accelerator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def by_lightning(accumulate: int, fail: bool = False) -> Result:
    with their_warnings():
        lightning = pytest.importorskip("lightning", reason="lightning is not installed")
        net = model()

        class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
                if fail and number == 3:
                    raise ZeroDivisionError
                return functional.cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.SGD:
                return sgd(self.net)

        class Follow(lightning.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
                hooks.accumulating = (number + 1) % trainer.accumulate_grad_batches > 0

            def on_train_batch_end(self, *_: Any) -> None:
                if not hooks.accumulating:
                    hooks.step()

            def on_train_epoch_end(self, *_: Any) -> None:
                hooks.epoch()

        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            accumulate_grad_batches=accumulate,
            callbacks=[Follow()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with hookrun.hooked(net, HOOKS) as hooks:
            trainer.fit(Module(), DataLoader(Digits(), batch_size=SIZE))
        return Result(weights_of(net), hooks)


def by_transformers(accumulate: int, tmp_path: Path, fail: bool = False) -> Result:
    with their_warnings():
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        pytest.importorskip("accelerate", reason="accelerate is not installed")

        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = model()
                self.calls = 0

            def forward(self, image: Tensor, label: Tensor) -> dict[str, Tensor]:
                self.calls += 1
                if fail and self.calls == 3:
                    raise ZeroDivisionError
                scores = self.net(image)
                return {"loss": functional.cross_entropy(scores, label), "logits": scores}

        class Follow(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self.left = args.gradient_accumulation_steps
                hooks.accumulating = self.left > 1

            def on_substep_end(self, *_: Any, **__: Any) -> None:
                self.left -= 1
                hooks.accumulating = self.left > 1

            def on_step_end(self, *_: Any, **__: Any) -> None:
                hooks.step()

            def on_epoch_end(self, *_: Any, **__: Any) -> None:
                hooks.epoch()

        class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
            def get_train_dataloader(self) -> DataLoader[Any]:
                return DataLoader(NamedDigits(), batch_size=SIZE)

        wrapped = Wrapped()
        optimizer = sgd(wrapped.net)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=SIZE,
            gradient_accumulation_steps=accumulate,
            max_grad_norm=0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = InOrder(
            wrapped,
            arguments,
            train_dataset=NamedDigits(),
            callbacks=[Follow()],
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        )
        with hookrun.hooked(wrapped.net, HOOKS) as hooks:
            trainer.train()
        return Result(weights_of(wrapped.net), hooks)


LOOPS: dict[str, Callable[[int, Path], Result]] = {
    "lightning": lambda accumulate, _: by_lightning(accumulate),
    "transformers": by_transformers,
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_other_libraries_equal_a_loop_by_hand(loop: str, accumulate: int, tmp_path: Path) -> None:
    expected, found = by_hand(accumulate), LOOPS[loop](accumulate, tmp_path)
    assert_close(found.weights, expected.weights)
    assert_close(found.gradients, expected.gradients)
    assert_close(found.outputs, expected.outputs)
    assert [each[:2] for each in found.norms] == [each[:2] for each in expected.norms]
    assert [each[2] for each in found.norms] == pytest.approx([each[2] for each in expected.norms])
    assert len(found.gradients["layers.2.weight"]) == EPOCHS * BATCHES // accumulate
    assert found.gradients["layers.2.weight"].abs().max() <= 0.01 * accumulate + 1e-6


@pytest.mark.parametrize("accumulate", [1, 3])
def test_hookruns_own_run_equals_a_loop_by_hand(accumulate: int, tmp_path: Path) -> None:
    expected = by_hand(accumulate)
    hooks_of = [f"+hooks.{name}={flow(hook)}" for name, hook in HOOKS.items()]
    command = [
        "model=mlp", "model.args.hidden=[32,32]", f"data.batch_size={SIZE}", "train.shuffle=false", "strict=true",
        f"train.epochs={EPOCHS}", f"train.limit_batches={BATCHES}", f"train.accumulate={accumulate}",
        "train.optimizer.name=SGD", "train.optimizer.lr=0.1", "+train.optimizer.momentum=0.9",
        "compute.device=cpu", f"hydra.run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main([*command, *hooks_of]) == 0
    run = hookrun.open_run(tmp_path / "run")
    assert_close(load_file(run.path / "checkpoints/last.safetensors"), expected.weights)
    for path, gradients in expected.gradients.items():
        assert_close(run.captures["gradients"][path][:], gradients)
    assert_close(run.captures["outputs"]["layers.3"][:], expected.outputs)
    found = [(line["step"], line["epoch"], line["norm"]) for line in run.stats if line["hook"] == "norms"]
    assert [each[:2] for each in found] == [each[:2] for each in expected.norms]


def flow(value: Any) -> str:
    """A value in the syntax of Hydra's command line."""
    match value:
        case dict():
            return "{" + ", ".join(f"{key}: {flow(member)}" for key, member in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(flow, value)) + "]"
        case str():
            return f"'{value}'"
    return str(value)


@pytest.mark.parametrize("loop", LOOPS)
def test_hooks_are_removed_when_a_loop_fails(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nets: list[nn.Module] = []
    made = model

    def remembered() -> nn.Module:
        nets.append(made())
        return nets[-1]

    monkeypatch.setitem(globals(), "model", remembered)
    with pytest.raises(ZeroDivisionError):
        by_lightning(1, fail=True) if loop == "lightning" else by_transformers(1, tmp_path, fail=True)
    assert not any(
        value for module in nets[0].modules() for key, value in vars(module).items() if key.endswith("_hooks")
    )
