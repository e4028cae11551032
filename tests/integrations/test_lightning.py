"""The Lightning callback, compared with a loop by hand."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookrun
from hookrun.store.verify import verify

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch", reason="hookrun[lightning] is not installed")

Callback = hookrun.integrations.lightning.Callback


ACCUMULATE = 2
EPOCHS = 2
RATE = 0.5


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", hookrun.HookrunWarning)
        yield


@pytest.fixture
def loader(samples) -> Any:
    return DataLoader(TensorDataset(*samples), batch_size=4)


def test_predict_may_follow_fit_with_test(tmp_path: Path, samples, loader, plain, spec) -> None:
    module = Module()
    callback = Callback(spec, run_dir=tmp_path / "mine")
    expected = plain.by_hand(module.net, samples)
    first_loss = plain.loss_of_first_step(module.net, samples)
    made = trainer(callback)
    made.fit(module, loader, loader)
    assert plain.same(module.net, expected)
    assert plain.unhooked(module)
    run = hookrun.open_run(tmp_path / "mine")
    plain.check_a_fit(run, first_loss)
    lines = [(line["split"], line["epoch"], line["step"], *list(line)[3:]) for line in run.metrics]
    wanted = list[tuple[Any, ...]]()
    for epoch in range(EPOCHS):
        first = 3 * epoch
        for step in range(first, first + 3):
            wanted.append(("train", epoch, step, "loss_step"))
        wanted.append(("val", epoch, first + 3, "val_loss"))
        wanted.append(("train", epoch, first + 3, "loss_epoch"))
        wanted.append(("train", epoch, first + 3, "late"))
    assert lines == wanted
    inputs, target = samples
    last = run.metrics[-3]["val_loss"]
    assert last == pytest.approx(
        float(nn.functional.cross_entropy(expected(inputs), target).detach()), rel=1e-5
    )
    assert [line["late"] for line in run.metrics if "late" in line] == [0.5, 1.5]
    assert verify(run.path).bad == []
    assert (run.path / "report.html").exists()

    made.test(module, loader, verbose=False)
    made.predict(module, loader)
    assert [path.name for path in callback.run_dirs] == ["mine", "mine-2", "mine-3"]
    tested, predicted = (hookrun.open_run(path) for path in callback.run_dirs[1:])
    assert tested.status["status"] == predicted.status["status"] == "done"
    assert plain.unhooked(module)
    assert [(line["split"], line["val_loss"]) for line in tested.metrics] == [("test", pytest.approx(last))]
    assert predicted.captures["seen"]["net.0"].sample_ids.tolist() == [*range(22)]
    assert set(predicted.captures["seen"]["net.0"].splits) == {""}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"log_every_n_steps": 50}, [2, 5]),
        ({"log_every_n_steps": 2}, [1, 2, 3, 5]),
        ({"log_every_n_steps": 3}, [2, 5]),
        ({"log_every_n_steps": 50, "max_steps": 5}, [2, 4]),
        ({"log_every_n_steps": 50, "limit_train_batches": 3, "max_epochs": 1}, [1]),
        ({"log_every_n_steps": 0}, []),
    ],
    ids=str,
)
def test_the_last_loss_of_an_epoch_is_logged_at_every_frequency(
    options: dict[str, Any], steps: list[int], tmp_path: Path, loader, spec
) -> None:
    every = tmp_path / "every"
    trainer(Callback(spec, run_dir=every), **{**options, "log_every_n_steps": 1}).fit(
        Module(), loader, loader
    )
    trainer(Callback(spec, run_dir=tmp_path / "mine"), **options).fit(Module(), loader, loader)
    of_all = logged_losses(every)
    assert logged_losses(tmp_path / "mine") == {step: of_all[step] for step in steps}
    lines = hookrun.open_run(tmp_path / "mine").metrics
    assert sum("loss_step" in line for line in lines) == len(steps)


def test_an_exception_ends_the_run(tmp_path: Path, loader, plain, spec) -> None:
    for number, error in enumerate((ValueError("boom"), KeyboardInterrupt())):

        class Broken(Module):
            def training_step(self, batch: Any, at: int, error: BaseException = error) -> Any:
                if at == 3:
                    raise error
                return super().training_step(batch, at)

        module = Broken()
        callback = Callback(spec, run_dir=tmp_path / f"{number}")
        with pytest.raises((ValueError, SystemExit)):
            trainer(callback).fit(module, loader, loader)
        status = hookrun.open_run(tmp_path / f"{number}").status
        assert status["status"] == ("interrupted" if number else "failed")
        assert plain.unhooked(module)
        assert callback.following is None
    wrong = {**spec, "wrong": {**spec["seen"], "select": "nothing"}}
    with pytest.raises(hookrun.CompileError):
        trainer(Callback(wrong, run_dir=tmp_path / "c")).fit(Module(), loader)
    assert not (tmp_path / "c").exists()


def test_added_parameters_are_not_filled_again(tmp_path: Path, loader) -> None:
    spec = {
        "bias": {"select": "net.0", "hook": "forward", "action": "add_bias", "value": 0.0, "trainable": True},
        "fill": {"select": "net.2", "hook": "apply", "action": "fill", "value": 0.25},
    }
    module = Module()
    callback = Callback(spec, run_dir=tmp_path / "mine")
    made = trainer(callback)
    made.fit(module, loader)
    (bias,) = callback.hooks.parameters()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert bias.abs().max() > 0
    assert not torch.equal(module.net[2].weight, torch.full((3, 8), 0.25))
    made.test(module, loader, verbose=False)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_samples_may_come_from_a_function(tmp_path: Path, loader) -> None:
    _, data = hookrun.build(overrides=["compute.device=cpu", "train.limit_batches=2", "data.batch_size=4"])
    spec = {"seen": {"select": "net.0", "hook": "forward", "action": "capture"}}
    for name, given, batches, samples in (
        ("own", None, data.loader("train"), [batch.ids for batch in data.loader("train").epoch(0)]),
        ("function", lambda batch: range(50, 50 + len(batch[0])), loader, [torch.arange(50, 54)] * 2),
    ):
        callback = Callback(spec, run_dir=tmp_path / name, samples=given)
        trainer(callback, max_epochs=1, limit_train_batches=2).fit(Module(), batches)
        rows = hookrun.open_run(tmp_path / name).captures["seen"]["net.0"]
        assert sorted(rows.sample_ids.tolist()) == sorted(torch.cat(samples).tolist())


def test_gradients_are_seen_unscaled(tmp_path: Path, samples, loader, plain, spec) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    # on a CPU fp16 is slow and Lightning does not offer it, but its scaler works
    class Scaled(MixedPrecision):
        def autocast_context_manager(self) -> Any:
            return torch.autocast("cpu", enabled=False)

    module = Module()
    callback = Callback(spec, run_dir=tmp_path / "mine")
    expected = plain.by_hand(module.net, samples)
    first_loss = plain.loss_of_first_step(module.net, samples)
    plugin = Scaled("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer(callback, plugins=[plugin]).fit(module, loader, loader)
    for a, b in zip(module.net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    plain.check_a_fit(hookrun.open_run(tmp_path / "mine"), first_loss)


def test_a_check_stops_the_trainer(tmp_path: Path, loader) -> None:
    spec = {"small": {"select": "net.2", "hook": "forward", "action": "check", "max": -9.0, "policy": "stop"}}
    callback = Callback(spec, run_dir=tmp_path / "mine")
    made = trainer(callback, min_epochs=0)
    made.fit(Module(), loader)
    assert made.global_step < 3
    assert hookrun.open_run(tmp_path / "mine").status["status"] == "stopped"


def test_hooks_stay_in_a_graph_that_the_sanity_check_compiles(tmp_path: Path, loader) -> None:
    class Compiled(Module):
        copies = 0

        def on_fit_start(self) -> None:
            self.net.compile(backend="eager")

        def validation_step(self, batch: Any, number: int) -> None:
            super().validation_step(batch, number)
            (callback,) = self.trainer.callbacks
            self.copies += copy.deepcopy(callback).following is None

    spec = {"half": {"select": "net.2", "hook": "forward", "action": "scale", "factor": 0.5}}
    module = Compiled()
    callback = Callback(spec, run_dir=tmp_path / "mine")
    trainer(callback, max_epochs=1, num_sanity_val_steps=1, limit_val_batches=2).fit(module, loader, loader)
    assert callback.hooks.fired == {("half", "net.2"): len(loader) + 2}
    assert module.copies == 3


class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def _loss(self, batch: Any) -> Any:
        inputs, target = (
            (batch.inputs.flatten(1)[:, :4], batch.target % 3) if hasattr(batch, "ids") else batch
        )
        return nn.functional.cross_entropy(self.net(inputs), target)

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self._loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self._loss(batch), batch_size=len(batch[0]) if isinstance(batch, list) else 4)

    test_step = validation_step

    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.current_epoch) + 0.5)

    def predict_step(self, batch: Any, number: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    base = {"accelerator": "cpu", "accumulate_grad_batches": ACCUMULATE, "log_every_n_steps": 1}
    options = {"max_epochs": EPOCHS, **options}
    return pl.Trainer(callbacks=list(callbacks), logger=False, **{**quiet, **base, **options})


def logged_losses(path: Path) -> dict[int, float]:
    """Step -> the loss of its batch, as the run has it."""
    lines = hookrun.open_run(path).metrics
    return {line["step"]: line["loss_step"] for line in lines if "loss_step" in line}
