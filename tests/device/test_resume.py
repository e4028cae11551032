"""A run that is stopped on a device and resumed ends as the unbroken one there, also if its layers draw numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_files import recorded

import hookrun
from hookrun.cli import main
from hookrun.run.passes.resuming import Resuming
from hookrun.store.reader import Run

DROPPING = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        layers = nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10)
        super().__init__(*layers)
"""
BATCHES = 4
TRAIN = (
    *("model=python", "model.factory=dropping:Net", "compute.threads=1", "compute.capture_buffer=1"),
    *("data.batch_size=8", f"train.limit_batches={BATCHES}", "train.epochs=3", "train.checkpoint.save=last"),
    "+hooks.seen={select: '2', hook: forward, action: capture}",
    "+hooks.noisy={select: '1', hook: forward, action: noise, std: 0.5}",
    "+hooks.late={select: '4', hook: grad, action: stats, when: {step: {every: 2}}}",
)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a command line that saves a state after its n-th batch, and is killed a batch later."""

    def killed(*argv: str, after: int) -> None:
        passed = [0]
        real = Resuming.point

        def point(self: Resuming, due: bool = False, **options: bool) -> None:
            passed[0] += 1
            real(self, passed[0] == after)
            if passed[0] == after + 1:
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Resuming, "point", point)
            main([*argv])

    return killed


@pytest.fixture(autouse=True)
def dropping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pages: None) -> None:
    """A network with dropout, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOOKRUN_TRUST", "dropping")
    (tmp_path / "dropping.py").write_text(DROPPING)


@pytest.mark.parametrize("after", [2, BATCHES + 1])
def test_a_stopped_run_ends_as_the_unbroken_one(
    after: int,
    tmp_path: Path,
    run: Callable[..., Run],
    killed: Callable[..., None],
    device: torch.device,
    capsys,
) -> None:
    expected = recorded(run(*TRAIN))
    killed(*TRAIN, f"compute.device={device.type}", "hydra.run.dir=stopped", after=after)
    torch.rand(7, device=device)  # another process would have other numbers
    torch.manual_seed(99)
    capsys.readouterr()
    assert main(["resume=stopped"]) == 0
    said = capsys.readouterr().out
    assert "resumed from state_" in said
    assert "unbroken" not in said
    assert recorded(hookrun.open_run(tmp_path / "stopped")) == expected


@pytest.mark.parametrize("back", [False, True])
def test_a_state_of_another_device_goes_on_when_asked(
    back: bool, tmp_path: Path, killed: Callable[..., None], device: torch.device, capsys
) -> None:
    first, then = ("cpu", device.type) if back else (device.type, "cpu")
    killed(*TRAIN, f"compute.device={first}", "hydra.run.dir=moved", after=3)
    capsys.readouterr()
    assert main(["resume=moved", f"compute.device={then}"]) == 2
    assert f"compute.device: {first!r} there, {then!r} now" in capsys.readouterr().err
    assert main(["resume=moved", "resume_anyway=true", f"compute.device={then}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"NOTE: the state was saved on {first}, and the run goes on on {then}: what is drawn there" in said
    ended = hookrun.open_run(tmp_path / "moved")
    assert ended.status["status"] == "done"
    assert ended.env["device"] == then


class Killed(BaseException):
    """Raised where the process is killed."""
