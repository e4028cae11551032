"""After a run, however it ended, its directory has a status, the model has no hooks, and the process is restored."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer

from hookrun import models, tasks
from hookrun.cli import main
from hookrun.errors import HookrunError
from hookrun.store.run_dir import RunDir

QUICK = ("train.epochs=1", "train.limit_batches=4")
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
    build, built = models.build, []

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
    assert (found.status["status"], found.status["exit_code"]) == (status, code)
    assert found.status["reason"] == reason
    assert found.status["ended"] is not None
    assert installed(built[0]) == []
    assert [len(each) for each in hooks_of_all] == of_steps
    assert torch.equal(torch.get_rng_state(), state)
    assert {line["step"] for line in found.stats} == {0, 1, 2}, "what was seen before the failure is kept"
    assert len(found.metrics) == 2
    printed, told = capsys.readouterr()
    assert "Traceback" not in told
    assert str(found.path) in told
    assert "epoch 1/10" in printed, "there was a bar of a terminal"
    assert str(found.path) not in printed, "it was removed: rich sends what is written under a bar to stdout"


CLIP_FC = ("experiment=clip_fc", *QUICK)


def test_a_run_directory_has_the_configuration_and_the_results(shared) -> None:
    found = shared(*CLIP_FC)
    assert {path.name for path in found.path.iterdir()} >= {
        ".hydra", "plan.json", "status.json", "metrics.jsonl", "env.json", "checkpoints",
    }  # fmt: skip
    assert found.plan["hooks"][0]["name"] == "clip_fc"
    assert not (found.path / "tensorboard").exists(), "no logger by default"
    assert found.env["device"] == "cpu"
    assert all(not isinstance(value, dict | list) for line in found.metrics for value in line.values())


def test_a_sweep_returns_the_objective_of_each_run(run, shared, tmp_path: Path) -> None:
    trained = shared(*CLIP_FC)
    accuracies = [line["accuracy"] for line in trained.metrics if line["split"] == "val"]
    assert tasks.objective(trained.path) == max(accuracies)
    own_loss = ("model=tutorial/regression", "train.loss=output")
    lost = run(*QUICK, *own_loss, "train.optimizer.lr=1e30", "train.on_nonfinite=skip")
    assert lost.status["objective"]["metric"] == "val/loss" and lost.status["objective"]["value"] is None
    with pytest.raises(HookrunError, match=r"val/loss has no finite value .* metrics with one: "):
        tasks.objective(lost.path)
    without_metrics = RunDir.create(tmp_path / "predicted")
    without_metrics.set_status("done")
    without_metrics.close()
    with pytest.raises(HookrunError, match="neither accuracy nor loss"):
        tasks.objective(without_metrics.path)


def test_the_jobs_of_a_sweep_do_not_affect_each_other_and_keep_no_model(
    tmp_path: Path, hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of a sweep has the results that it has alone, and its model is freed when it ends."""
    alive, build = [], models.build

    def remember(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        alive.append(weakref.ref(model))
        return model

    noise = hook(select="relu1", hook="forward", action="noise", std=0.1, when="{probability: 0.5}")
    every = "+hooks.every={select: '**', hook: forward, action: capture}"
    common = [
        *QUICK,
        "compute.threads=1",
        "compute.device=cpu",
        "train.checkpoint.save=last",
        noise,
        *HOOKS,
        every,
    ]
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(models, "build", remember)
        assert main(["-m", *common, "seed=1,2", "hydra.sweep.dir=sweep"]) == 0
    gc.collect()
    assert len(alive) == 3, "one to check both jobs with, and one for each"
    assert [reference() for reference in alive] == [None, None, None]
    assert main([*common, "seed=2", "hydra.run.dir=alone"]) == 0
    assert torch.equal(torch.get_rng_state(), state)
    for file in ("metrics.jsonl", "checkpoints/last.safetensors"):
        of_jobs = [(tmp_path / name / file).read_bytes() for name in ("sweep/1", "alone", "sweep/0")]
        assert of_jobs[0] == of_jobs[1] != of_jobs[2], "the same seed repeats exactly"
