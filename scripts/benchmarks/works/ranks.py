"""Hooks under DistributedDataParallel, in two processes on this machine with the gloo backend."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from benchmarks.ddp_steps import BARE, BY_HAND
from benchmarks.measure import OURS, OtherOutputs, Result, Settings, judged

CLOSE = 1e-6


def ddp_step(settings: Settings) -> Result:
    """A training step of the mlp: all 15 activations captured, all reduced gradients clamped.

    The time of each way is its fastest in every ten steps, because two processes on a busy machine wait for each other.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rounds = 10 * settings.rounds
    command = [sys.executable, "-m", "benchmarks.ddp_steps"]
    pair = [
        subprocess.Popen([*command, str(rank), port, str(rounds)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said, _ = (each.communicate()[0] for each in pair)
    if any(each.returncode for each in pair):
        raise RuntimeError(f"the processes ended with {[each.returncode for each in pair]}")
    found = json.loads(said)
    if found["apart"] > CLOSE:
        raise OtherOutputs(f"{OURS} against {BY_HAND}: the weights differ by {found['apart']}")
    fastest = {
        name: [min(each[first : first + 10]) for first in range(0, rounds, 10)]
        for name, each in found["times"].items()
    }
    work = "mlp of width 256 under DDP on two gloo ranks, capture all 15 leaves and clamp all gradients"
    times = {name: fastest[name] for name in (BY_HAND, BARE, OURS)}
    return judged(f"{work}, a step", times, target=1.10, compared=(BY_HAND, OURS))


ROWS = (ddp_step,)
