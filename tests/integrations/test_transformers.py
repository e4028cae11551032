"""The transformers callback, compared with a loop by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.store.verify import verify

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="hookrun[transformers] is not installed")
    pytest.importorskip("accelerate", reason="hookrun[transformers] is not installed")
    Callback = hookrun.integrations.transformers.Callback
    from transformers import Trainer, TrainingArguments

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::hookrun.HookrunWarning"),
]


ACCUMULATE = 2
EPOCHS = 2
RATE = 0.5


@pytest.fixture
def trainer(tmp_path: Path, samples, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    data = [{"x": x, "labels": label} for x, label in zip(*samples, strict=True)]
    arguments = TrainingArguments(
        str(tmp_path / "theirs"), report_to=[], use_cpu=True, per_device_train_batch_size=4,
        per_device_eval_batch_size=4, gradient_accumulation_steps=ACCUMULATE, num_train_epochs=EPOCHS,
        learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0, save_strategy="no",
        eval_strategy="epoch", logging_steps=1, remove_unused_columns=False, disable_tqdm=True,
    )  # fmt: skip

    def trainer(model: nn.Module | None, *callbacks: Any, **more: Any) -> Any:
        both = {"train_dataset": data, "eval_dataset": data}
        return Plain(model=model, args=arguments, callbacks=list(callbacks), **both, **more)

    return trainer


def test_predict_may_follow_train_with_evaluate(tmp_path: Path, samples, trainer, plain, spec) -> None:
    model = Model()
    callback = Callback(spec, run_dir=tmp_path / "mine")
    expected = plain.by_hand(model.net, samples)
    first_loss = plain.loss_of_first_step(model.net, samples)
    made = trainer(model, callback)
    made.train()
    assert plain.same(model.net, expected)
    assert plain.unhooked(model)
    run = hookrun.open_run(tmp_path / "mine")
    plain.check_a_fit(run, first_loss)
    losses = [
        (line["split"], line["epoch"], line["step"])
        for line in run.metrics
        if {"loss", "eval_loss"} & set(line)
    ]
    assert losses == [
        *[("train", 0, 1), ("train", 0, 2), ("train", 0, 3), ("val", 0, 3)],
        *[("train", 1, 4), ("train", 1, 5), ("train", 1, 6), ("val", 1, 6)],
    ]
    assert verify(run.path).bad == []
    assert (run.path / "report.html").exists()
    made.evaluate()
    made.predict(made.eval_dataset)
    assert [path.name for path in callback.run_dirs] == ["mine", "mine-2", "mine-3"]
    evaluated, predicted = (hookrun.open_run(path) for path in callback.run_dirs[1:])
    (line,), (other,) = evaluated.metrics, predicted.metrics
    assert line["eval_loss"] == pytest.approx(other["test_loss"])
    assert other["split"] == "test"
    for each in (evaluated, predicted):
        assert each.status["status"] == "done"
        assert each.captures["seen"]["net.0"].sample_ids.tolist() == [*range(22)]
    assert plain.unhooked(model)


def test_a_later_callback_is_followed_after_an_exception(tmp_path: Path, trainer, plain, spec) -> None:
    for number, method in enumerate(("train", "evaluate")):
        model = Model(fails_at=3)
        callback = Callback(spec, run_dir=tmp_path / f"{number}")
        made = trainer(model)
        made.add_callback(callback)
        with pytest.raises(ValueError, match="boom"):
            getattr(made, method)()
        assert hookrun.open_run(tmp_path / f"{number}").status["reason"] == "ValueError: boom"
        assert plain.unhooked(model)
        assert callback.following is None
    made.remove_callback(callback)
    made.evaluate()
    assert len(callback.run_dirs) == 1


def test_added_parameters_are_not_filled_again(tmp_path: Path, trainer) -> None:
    spec = {
        "bias": {"select": "net.0", "hook": "forward", "action": "add_bias", "value": 0.0, "trainable": True},
        "fill": {"select": "net.2", "hook": "apply", "action": "fill", "value": 0.25},
    }
    model = Model()
    callback = Callback(spec, run_dir=tmp_path / "mine")
    made = trainer(model)
    made.add_callback(callback)
    made.train()
    (bias,) = callback.hooks.parameters()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made.evaluate()
    assert bias.abs().max() > 0
    for name, x in model.state_dict().items():
        assert torch.equal(x, state[name])


def test_another_model_than_the_hooked_one_is_refused(tmp_path: Path, trainer, spec) -> None:
    made = trainer(None, Callback(spec, run_dir=tmp_path / "mine"), model_init=Model)
    with pytest.raises(hookrun.HookrunError, match="give it `model=`"):
        made.train()
    assert hookrun.open_run(tmp_path / "mine").status["status"] == "failed"


def test_a_check_stops_the_trainer(tmp_path: Path, trainer) -> None:
    spec = {"small": {"select": "net.2", "hook": "forward", "action": "check", "max": -9.0, "policy": "stop"}}
    made = trainer(Model(), Callback(spec, run_dir=tmp_path / "mine"))
    made.train()
    assert made.state.global_step == 1
    assert hookrun.open_run(tmp_path / "mine").status["status"] == "stopped"


class Model(nn.Module):
    def __init__(self, fails_at: int | None = None) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.calls, self.fails_at = 0, fails_at

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("boom")
        output = self.net(x)
        return {"loss": nn.functional.cross_entropy(output, labels), "logits": output}


class Plain(Trainer):  # type: ignore[misc]
    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        return self.optimizer

    def _get_train_sampler(self, *_: Any) -> None:
        return None  # no shuffling
