"""The training loop: an epoch compared with the plainest loop with the same hooks, and a sweep of 100 small jobs."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import OURS, Result, Settings, judged
from benchmarks.works.start import HOOKRUN, ONE_BATCH, process

PLAIN = "the plainest loop, same hooks"
EPOCHS = 8
JOBS = 100


class PlainLoop:
    """A hand-written loop: training and validation on digits with the gradient of the last layer clipped."""

    def __init__(self) -> None:
        import torch

        import hookrun

        self.model, data = hookrun.build(experiment="clip_fc", overrides=["compute.device=cpu"])
        self.batches = {split: _rows(data, split) for split in ("train", "val")}
        self.model.fc.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.model.fc.bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.001)

    def epochs(self, count: int) -> None:
        """Run `count` epochs, each with the mean loss and the accuracy of both splits."""
        import torch
        from torch.nn.functional import cross_entropy

        for _ in range(count):
            for split, (x, y) in self.batches.items():
                train = split == "train"
                self.model.train(train)
                order = torch.randperm(len(x)) if train else torch.arange(len(x))
                loss_sum, hits = 0.0, 0
                for rows in order.split(64):
                    with torch.set_grad_enabled(train):
                        output = self.model(x[rows])
                        loss = cross_entropy(output, y[rows])
                    if train:
                        self.optimizer.zero_grad()
                        loss.backward()
                        self.optimizer.step()
                    loss_sum += loss.item() * len(rows)
                    hits += int((output.argmax(1) == y[rows]).sum())


def _rows(data: Any, split: str) -> tuple[Any, Any]:
    """A whole split in memory: inputs [N, 1, 8, 8] and labels [N]."""
    import torch

    samples = list(data[split])
    return torch.stack([sample[0] for sample in samples]), torch.tensor(
        [int(sample[1]) for sample in samples]
    )


def seconds_of(run: Callable[[], object]) -> float:
    """The wall time of a function."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def train(epochs: int) -> None:
    """A training run in this process, in a temporary folder."""
    import contextlib
    import io

    from hookrun.cli import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = ["experiment=clip_fc", f"train.epochs={epochs}", "compute.device=cpu", "task.loggers=[]"]
        code = main([*arguments, f"hydra.run.dir={folder}/run"])
    if code:
        raise RuntimeError(f"hookrun ended with {code}")


def train_epoch(settings: Settings) -> Result:
    """One epoch, from the difference between a run of many epochs and a run of one, so that start-up does not count."""
    plain = PlainLoop()
    times: dict[str, list[float]] = {PLAIN: [], OURS: []}
    train(1)
    plain.epochs(1)
    for _ in range(settings.slow()):
        times[PLAIN].append(seconds_of(lambda: plain.epochs(EPOCHS)) / EPOCHS)
        least = seconds_of(lambda: train(1))
        times[OURS].append((seconds_of(lambda: train(1 + EPOCHS)) - least) / EPOCHS)
    return judged("an epoch of train on digits with clip_fc", times, target=1.08)


def sweep(settings: Settings) -> Result:
    """100 jobs of one epoch in one process, less one start, compared with as many epochs in the plainest loop."""
    plain = PlainLoop()
    plain.epochs(1)
    jobs = JOBS if settings.rounds >= 8 else 2
    times: dict[str, list[float]] = {PLAIN: [], OURS: []}
    with tempfile.TemporaryDirectory() as folder:
        one = process([*HOOKRUN, *ONE_BATCH], folder)
        arguments = [
            "-m",
            "experiment=clip_fc",
            "train.epochs=1",
            f"seed=range({jobs})",
            "compute.device=cpu",
        ]
        many = process([sys.executable, "-m", "hookrun", *arguments], folder)
        for _ in range(min(settings.slow(1), 2)):
            times[PLAIN].append(seconds_of(lambda: plain.epochs(jobs)))
            start = seconds_of(one)
            times[OURS].append(seconds_of(many) - start)
    return judged(f"a sweep of {jobs} jobs of one epoch, less one start", times, target=3)


ROWS = (train_epoch, sweep)
