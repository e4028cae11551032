"""Checks that stop a run, hooks that do nothing, and everything else that ends a run early."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hookrun.cli import main
from hookrun.spec.experiment import Compute
from hookrun.store.files import StoreError
from hookrun.tasks.run.endings import ending
from hookrun.tasks.run.session import session

QUICK = ("train.epochs=1", "train.limit_batches=4")


def val(run: Any) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line["split"] == "val"]


@pytest.mark.parametrize("strict", ["true", "false"])
def test_a_hook_that_never_fires_is_a_warning_or_an_error(run, capsys, strict: str, hook) -> None:
    never = hook(select="fc", hook="output_grad", action="print", when="{step: 1000}")
    found = run(*QUICK, never, f"strict={strict}", code=1 if strict == "true" else 0)
    printed = capsys.readouterr()
    assert ("WARNING: h never fired on fc" in printed.out) == (strict == "false")
    assert ("h never fired on fc" in found.status["reason"]) == (strict == "true")
    for what in ("h never fired on fc", "run directory:"):
        assert (printed.out + printed.err).count(what) == 1, what


def test_a_model_without_trainable_parameters_is_refused(refused, hook) -> None:
    assert "nothing to train" in refused(*QUICK, hook(select="''", hook="apply", action="freeze"))


def test_a_loss_that_does_not_fit_the_output_is_an_error(fails) -> None:
    said = fails("model=tutorial/doubling", "train.loss=cross_entropy")
    assert "train.loss=cross_entropy: the model returned shape [5]" in said


def test_a_stopping_check_ends_validation_and_evaluation_too(run, executed, hook) -> None:
    stop = hook(
        select="fc", hook="forward", action="check", max=-1e9, policy="stop", when="{mode: eval, step: [1]}"
    )
    trained = run("train.epochs=5", "train.limit_batches=4", stop, code=3)
    assert trained.status["status"] == "stopped"
    assert len(val(trained)) == 1
    assert (trained.path / "checkpoints/last.safetensors").exists()
    executed("task=evaluate", stop, stops=True)
    seen = executed("task=predict", stop, stops=True).predictions
    assert seen is not None and len(seen) == 2 * 64


def test_a_stopping_check_in_training_ends_it_after_that_step(executed, hook) -> None:
    stop = hook(select="fc", hook="forward", action="check", max=-1e9, policy="stop", when="{step: [2]}")
    found = executed("train.epochs=2", "train.limit_batches=6", "train.log_every=1", stop, stops=True)
    assert [line["step"] for line in found.metrics] == [0, 1, 2], "and no validation"


@pytest.mark.usefixtures("pages")
def test_a_terminated_run_ends_like_an_interrupted_one(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers and containers send SIGTERM before they kill."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        module = importlib.import_module("hookrun.tasks.training.loop")
        monkeypatch.setattr(module, "_after_epoch", lambda *_: signal.raise_signal(signal.SIGTERM))
        found = run(*QUICK, code=143)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (found.status["status"], found.status["reason"]) == ("interrupted", "interrupted by SIGTERM")
    assert found.status["exit_code"] == 143
    assert (found.path / "report.html").is_file()


def test_an_interruption_while_torch_is_imported_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_deterministic_algorithms` imports much of torch, and fails where it is called again after half of that."""

    def interrupted(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(torch, "use_deterministic_algorithms", half_imported)
        raise KeyboardInterrupt

    def half_imported(*_: Any, **__: Any) -> None:
        raise RuntimeError("registered an operator twice")

    monkeypatch.setattr(torch, "use_deterministic_algorithms", interrupted)
    with pytest.raises(KeyboardInterrupt), session(Compute(compile=True), 0):
        pass


@pytest.mark.parametrize(
    ("policy", "code", "status"), [("error", 3, "failed"), ("stop", 3, "stopped"), ("warn", 0, "done")]
)
def test_a_failed_check_reports_what_it_found(run, hook, policy: str, code: int, status: str) -> None:
    """With `warn` every call that fails is a record, in training and in validation."""
    entry = hook(select="fc", hook="forward", action="check", max=0.01, policy=policy)
    found = run(*QUICK, entry, code=code)
    assert (found.status["status"], found.status["exit_code"]) == (status, code)
    assert (found.path / "checkpoints/last.safetensors").exists() == (policy != "error")
    [record, *_] = found.stats
    assert record["ok"] is False and record["largest"] > 0.01 > record["least"]
    said = f"at most 0.01, found {record['least']:.6g} to {record['largest']:.6g}"
    reason = found.status["reason"]
    if policy == "warn":
        modes = [(line["mode"], line["policy"]) for line in found.stats]
        assert modes == [("train", "warn")] * 4 + [("eval", "warn")] * 4
    else:
        assert said in reason and "'h'" in reason and "fc" in reason


def test_a_check_that_found_nan_reports_it(fails, hook) -> None:
    broken = "+hooks.broken={select: fc, hook: forward, action: replace, value: nan, priority: -1}"
    said = fails(*QUICK, broken, hook(select="fc", hook="forward", action="check"))
    assert said.endswith("expected every element to be finite, found nan")


def test_a_resumed_run_has_the_best_weights_of_an_uninterrupted_one(run, hook) -> None:
    """The half epoch before a stop is not scored: its accuracy is that of the training."""
    check = {
        "select": "fc",
        "hook": "forward",
        "action": "check",
        "max": -1e9,
        "when": "{mode: train, step: [7]}",
    }
    argv = ["train.epochs=4", "train.limit_batches=3", "train.optimizer.lr=0.01"]
    whole = run(*argv, hook(**check, policy="warn"))
    stopped = run(*argv, hook(**check, policy="stop"), code=3)
    assert main([f"resume={stopped.path}"]) == 0, "it goes on after the step that it was stopped at"
    best = [found.path / "checkpoints/best.safetensors" for found in (whole, stopped)]
    one, other = (load_file(path) for path in best)
    assert all(one[name].equal(other[name]) for name in one)


def test_all_final_steps_run_and_the_first_error_is_raised(capsys) -> None:
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
        assert "three" in told and ("one" in told) == fails
