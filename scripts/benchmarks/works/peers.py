"""Libraries that need their own process: torchlens wraps torch's functions for the whole process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.measure import Result, Settings, Timing, Ways, measured
from benchmarks.models import leaves, mlp
from benchmarks.threads import threads

WORK = "mlp, capture all 15 leaves, in a process of its own"


def torchlens(settings: Settings) -> Result:
    """torchlens's ratio to the bare model, measured in another process."""
    if importlib.util.find_spec("torchlens") is None:
        return Result(WORK, "bare", None, (), missing={"torchlens": "not installed"})
    command = [sys.executable, "-m", "benchmarks.works.peers", str(settings.rounds), str(settings.seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.splitlines() or ["it failed"])[-1][:160]
        return Result(WORK, "bare", None, (), missing={"torchlens": why})
    found = json.loads(done.stdout.splitlines()[-1])
    timings = tuple(Timing(**each) for each in found.pop("timings"))
    return Result(**{**found, "compared": tuple(found["compared"])}, timings=timings)


def here(settings: Settings) -> Result:
    """Measure in this process, which must not measure anything else."""
    import torchlens

    subject, ways = mlp(), Ways()
    x, bare = subject.x, subject.make()
    names = [name for name, _ in leaves(bare)]
    wanted: dict[str, Any] = {}
    for name, module in leaves(bare):
        module.register_forward_hook(lambda module, args, output, name=name: wanted.__setitem__(name, output))
    bare(x)
    plain, traced = subject.make(), subject.make()

    def outputs() -> dict[str, Any]:
        trace = torchlens.trace(traced, x)
        return {name: trace.modules[name].out for name in names}

    ways.add("bare", lambda: plain(x), lambda: dict(wanted))
    ways.add("torchlens", lambda: torchlens.trace(traced, x), outputs)
    with threads(1):
        return measured(WORK, ways, settings, target=None)


ROWS = (torchlens,)

if __name__ == "__main__":
    print(json.dumps(asdict(here(Settings(int(sys.argv[1]), float(sys.argv[2]))))))
