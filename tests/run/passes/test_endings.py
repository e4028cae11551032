"""Runs end in many ways: each leaves a status, a model without hooks and the process as it was."""

from __future__ import annotations

import gc
import importlib
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import optimizer

from hookrun import models
from hookrun.cli import main
from hookrun.errors import HookrunError
from hookrun.run import tasks
from hookrun.run.experiment.session import session
from hookrun.run.experiment.settings import Compute
from hookrun.run.passes.endings import ending
from hookrun.store.files import StoreError
from hookrun.store.run_dir import RunDir

QUICK = ("train.epochs=1", "train.limit_batches=4")


def test_a_model_without_trainable_parameters_is_refused(refused, hook) -> None:
    assert "nothing to train" in refused(*QUICK, hook(select="''", hook="apply", action="freeze"))


def test_a_stopping_check_ends_an_evaluation_too(executed, hook) -> None:
    stop = hook(
        select="fc", hook="forward", action="check", max=-1e9, policy="stop", when="{mode: eval, step: [1]}"
    )
    trained = executed("train.epochs=5", "train.limit_batches=4", stop, stops=True)
    assert [line["split"] for line in trained.metrics].count("val") == 1
    assert (trained.path / "checkpoints/last.safetensors").exists()
    executed("task=evaluate", stop, stops=True)
    seen = executed("task=predict", stop, stops=True).predictions
    assert seen is not None
    assert len(seen) == 2 * 64


def test_a_stopping_check_in_training_ends_it_after_that_step(executed, hook) -> None:
    stop = hook(select="fc", hook="forward", action="check", max=-1e9, policy="stop", when="{step: [2]}")
    found = executed("train.epochs=2", "train.limit_batches=6", "train.log_every=1", stop, stops=True)
    assert [line["step"] for line in found.metrics] == [0, 1, 2], "and no validation"


@pytest.mark.usefixtures("pages")
def test_a_terminated_run_ends_like_an_interrupted_one(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers and containers send SIGTERM before they kill."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        module = importlib.import_module("hookrun.run.training.loop")
        monkeypatch.setattr(module, "_after_epoch", lambda *_: signal.raise_signal(signal.SIGTERM))
        found = run(*QUICK, code=143)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found.status["status"] == "interrupted"
    assert found.status["reason"] == "interrupted by SIGTERM"
    assert found.status["exit_code"] == 143
    assert (found.path / "report.html").is_file()


def test_an_interruption_of_importing_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_deterministic_algorithms` imports much of torch, and fails where it is called again after half of that."""

    def interrupted(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(torch, "use_deterministic_algorithms", half_imported)
        raise KeyboardInterrupt

    def half_imported(*_: Any, **__: Any) -> None:
        raise RuntimeError("registered an operator twice")

    monkeypatch.setattr(torch, "use_deterministic_algorithms", interrupted)
    with pytest.raises(KeyboardInterrupt), session(Compute(compile=True), 0):
        pass


@pytest.mark.parametrize(("policy", "status"), [("error", "failed"), ("stop", "stopped")])
def test_a_failed_check_ends_the_run_with_what_it_found(run, hook, policy: str, status: str) -> None:
    found = run(*QUICK, hook(select="fc", hook="forward", action="check", max=0.01, policy=policy), code=3)
    assert found.status["status"] == status
    assert found.status["exit_code"] == 3
    assert (found.path / "checkpoints/last.safetensors").exists() == (policy != "error")
    [record, *_] = found.stats
    assert record["ok"] is False
    assert record["largest"] > 0.01 > record["least"]
    reason = found.status["reason"]
    assert f"at most 0.01, found {record['least']:.6g} to {record['largest']:.6g}" in reason
    assert "'h'" in reason
    assert "fc" in reason


def test_a_failed_check_that_warns_is_a_record_of_each_call(executed, hook) -> None:
    found = executed(*QUICK, hook(select="fc", hook="forward", action="check", max=0.01, policy="warn"))
    modes = [(line["mode"], line["policy"]) for line in found.stats]
    assert modes == [("train", "warn")] * 4 + [("eval", "warn")] * 4


def test_a_check_that_found_nan_reports_it(fails, hook) -> None:
    broken = "+hooks.broken={select: fc, hook: forward, action: replace, value: nan, priority: -1}"
    said = fails(*QUICK, broken, hook(select="fc", hook="forward", action="check"))
    assert said.endswith("expected every element to be finite, found nan")


def test_a_resumed_run_has_the_same_best_weights(run, executed, hook) -> None:
    """The half epoch before a stop is not scored: its accuracy is that of the training."""
    argv = ["train.epochs=4", "train.limit_batches=3", "train.optimizer.lr=0.01"]
    check = {"select": "fc", "hook": "forward", "action": "check", "max": -1e9, "policy": "stop"}
    whole = executed(*argv)
    stopped = run(*argv, hook(**check, when="{mode: train, step: [7]}"), code=3)
    assert main([f"resume={stopped.path}"]) == 0, "it goes on after the step that it was stopped at"
    best = [found.path / "checkpoints/best.safetensors" for found in (whole, stopped)]
    one, other = (load_file(path) for path in best)
    for name in one:
        assert one[name].equal(other[name])


def test_all_final_steps_run_before_an_error_is_raised(capsys) -> None:
    done = list[str]()

    def refused(text: str) -> Callable[[], None]:
        def last() -> None:
            done.append(text)
            raise StoreError(text)

        return last

    for fails in (False, True):
        done.clear()
        with (
            pytest.raises(ValueError if fails else StoreError, match="block" if fails else "one"),
            ending(refused("one"), lambda: done.append("two"), refused("three")),
        ):
            if fails:
                raise ValueError("the block")
        assert done == ["one", "two", "three"]
        told = capsys.readouterr().err
        assert "three" in told
        assert ("one" in told) == fails


TWO_LAYERS = """
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)
        self.calls = 0

    def forward(self, x):
        x = self.fc(x.flatten(1))
        self.calls += not isinstance(x, torch._subclasses.FakeTensor)
        if self.calls == 3:
            raise {error}
        return x
"""


def installed(model: torch.nn.Module) -> list[str]:
    """The hook dictionaries of a model that are not empty."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [name for module in model.modules() for name in names if getattr(module, name)]
    return found + [
        "parameter" for p in model.parameters() if p._backward_hooks or p._post_accumulate_grad_hooks
    ]


HOOKS = [
    f"+hooks.{kind}={{select: fc, hook: {kind}, action: stats}}"
    for kind in (
        "forward_pre", "forward", "backward_pre", "backward", "output_grad", "grad", "post_accumulate_grad",
        "saved_tensors", "optimizer_step_pre", "optimizer_step_post",
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code", "status", "reason"),
    [
        ("ValueError('batch 3 is bad')", 1, "failed", "ValueError: batch 3 is bad"),
        ("SystemExit(0)", 1, "failed", "SystemExit: 0"),
        ("KeyboardInterrupt", 130, "interrupted", "interrupted from the keyboard"),
    ],
)
def test_a_failure_in_the_third_batch(
    run, own_model, monkeypatch: pytest.MonkeyPatch, capsys, error: str, code: int, status: str, reason: str
) -> None:
    build = models.build
    built = []

    def remember(*args: Any, **kwargs: Any) -> Any:
        built.append(build(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr(models, "build", remember)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    state = torch.get_rng_state()
    # The first installation of a process registers one pair for good, and it may be that of this test.
    hooks_of_all = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    of_steps = [max(len(each), 1) for each in hooks_of_all]
    found = run(*own_model(TWO_LAYERS.format(error=error)), "train.log_every=1", *HOOKS, code=code)
    assert found.status["status"] == status
    assert found.status["exit_code"] == code
    assert found.status["reason"] == reason
    assert found.status["ended"] is not None
    assert installed(built[0]) == []
    assert [len(each) for each in hooks_of_all] == of_steps
    assert torch.equal(torch.get_rng_state(), state)
    assert {line["step"] for line in found.stats} == {0, 1, 2}, "what was seen before the failure is kept"
    assert len(found.metrics) == 2
    assert (found.path / "hooks.json").exists()
    printed, told = capsys.readouterr()
    assert "Traceback" not in told
    assert str(found.path) in told
    assert "epoch 1/10" in printed, "there was a bar of a terminal"
    assert str(found.path) not in printed, "it was removed: rich sends what is written under a bar to stdout"


def test_a_sweep_returns_the_objective_of_each_run(run, executed, tmp_path: Path) -> None:
    trained = executed("experiment=clip_fc", *QUICK)
    assert not (trained.path / "tensorboard").exists(), "no logger by default"
    accuracies = [line["accuracy"] for line in trained.metrics if line["split"] == "val"]
    assert tasks.objective(trained.path) == max(accuracies)
    own_loss = ("model=tutorial/regression", "train.loss=output")
    lost = run(*QUICK, *own_loss, "train.optimizer.lr=1e30", "train.on_nonfinite=skip")
    assert lost.status["objective"]["metric"] == "val/loss"
    assert lost.status["objective"]["value"] is None
    with pytest.raises(HookrunError, match=r"val/loss has no finite value .* metrics with one: "):
        tasks.objective(lost.path)
    without_metrics = RunDir.create(tmp_path / "predicted")
    without_metrics.set_status("done")
    without_metrics.close()
    with pytest.raises(HookrunError, match="neither accuracy nor loss"):
        tasks.objective(without_metrics.path)


def test_jobs_of_a_sweep_keep_no_model(
    tmp_path: Path, executed, hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a sweep has the results that it has alone, and its model is freed when it ends."""
    alive = []
    build = models.build

    def remember(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        alive.append(weakref.ref(model))
        return model

    noise = hook(select="relu1", hook="forward", action="noise", std=0.1, when="{probability: 0.5}")
    every = "+hooks.every={select: '**', hook: forward, action: capture}"
    common = [*QUICK, "compute=cpu", "compute.threads=1", "train.checkpoint.save=last", noise, *HOOKS, every]
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(models, "build", remember)
        assert main(["-m", *common, "seed=1,2", "hydra.sweep.dir=sweep"]) == 0
    gc.collect()
    assert len(alive) == 3, "one to check both jobs with, and one for each"
    assert [reference() for reference in alive] == [None, None, None]
    alone = executed(*common, "seed=2").path
    assert torch.equal(torch.get_rng_state(), state)
    for file in ("metrics.jsonl", "checkpoints/last.safetensors"):
        of_jobs = [(path / file).read_bytes() for path in (tmp_path / "sweep/1", alone, tmp_path / "sweep/0")]
        assert of_jobs[0] == of_jobs[1] != of_jobs[2], "the same seed repeats exactly"
