"""Tests and measures hookrun on a device, and says clearly what it found: `scripts/gpu`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECOND = "second"
TESTS, TWO, BENCH = "tests", "two GPUs", "bench"
LIMITS = {TESTS: 270, TWO: 90, BENCH: 110}
"""The most seconds that each part may take; together under eight minutes."""

OK, FAILED, LEFT_OUT = "ok", "FAILED", "left out"

TRAINED = (
    *("data.batch_size=32", "train.epochs=2", "train.limit_batches=8", "train.checkpoint.save=last"),
    "+hooks.bound={select: '**', hook: optimizer_step_pre, action: clip_norm, max_norm: 0.5}",
    "+hooks.seen={select: relu1, hook: forward, action: capture}",
)
"""A training that has to give the same weights in one process and in two."""


@dataclass(frozen=True)
class Part:
    """One part of the check: ok, FAILED or left out, and what is to be known of it."""

    name: str
    result: str
    seconds: float
    what: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, print a line for each, and write them to a file on request. Returns 1 if one failed, else 0."""
    args = parsed(argv)
    if (missing := missing_device(args.device)) is not None:
        print(f"scripts/gpu: {missing}", file=sys.stderr)
        return 2
    about = facts(args.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    parts, measured = [tests(args.device, args.tests)], None
    told(parts[-1])
    parts.append(two_processes(args.device, int(about["devices"])))
    told(parts[-1])
    if args.bench:
        part, measured = bench(args.device)
        parts.append(part)
        told(part)
    failed = [part.name for part in parts if part.result == FAILED]
    if args.json:
        found = {**about, "parts": [asdict(part) for part in parts], "bench": measured}
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"written to {args.json}")
    print(f"failed on {args.device}: {', '.join(failed)}" if failed else f"all well on {args.device}")
    return 1 if failed else 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="by default cuda; second: the device of the tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found and measured to FILE")
    parser.add_argument(
        "--tests", nargs="*", default=["tests/device"], metavar="FILE", help="by default tests/device"
    )
    parser.add_argument("--no-bench", dest="bench", action="store_false", help="leave the measurements out")
    return parser.parse_args(argv)


def missing_device(device: str) -> str | None:
    """Why the check cannot run on this device, or None."""
    import torch

    if device == SECOND:
        return None
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is not None and there.type == torch.device(device).type:
        return None
    return (
        f"this machine has {'no accelerator' if there is None else f'an accelerator of type {there.type}'}, "
        f"not {device}: name it with --device, or try --device {SECOND}"
    )


def facts(device: str) -> dict[str, Any]:
    """The device, how many there are, and versions."""
    import torch

    found: dict[str, Any] = {"device": device, "torch": str(torch.__version__), "devices": 1}
    if device != SECOND:
        module = torch.get_device_module(device)
        named = getattr(module, "get_device_name", None)
        found |= {"name": named() if named else device, "devices": torch.accelerator.device_count()}
        found["cuda"] = torch.version.cuda
    return found


def tests(device: str, files: Sequence[str]) -> Part:
    """The tests of tests/device on the device, in up to six processes."""
    chosen = [str(path) for name in files for path in sorted((ROOT / name).glob("test_*.py"))] or list(files)
    workers = min(6, os.cpu_count() or 1, len(chosen))
    command = [
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
        "-n",
        str(workers if workers > 1 else 0),
    ]
    code, said, seconds = run([*command, "--dist=loadfile", *chosen], device, LIMITS[TESTS])
    lines = said.strip().splitlines() or ["nothing was said"]
    if code:
        print("\n".join(lines[-60:]), flush=True)
    return Part(TESTS, FAILED if code else OK, seconds, lines[-1].strip("= "))


def two_processes(device: str, devices: int) -> Part:
    """A training over two GPUs beside the same one on one GPU: equal weights, the same number of captured rows."""
    if device != "cuda" or devices < 2:
        return Part(TWO, LEFT_OUT, 0.0, f"there is {devices} device")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder, "one"), Path(folder, "two")
        typed = ["-m", "hookrun", f"compute.device={device}", *TRAINED]
        code, said, _ = run([*typed, f"hydra.run.dir={one}"], device, LIMITS[TWO] // 2)
        if not code:
            ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *typed]
            code, said, _ = run(
                [*ranks, "compute.strategy=ddp", f"hydra.run.dir={two}"], device, LIMITS[TWO] // 2
            )
        if code:
            print(said[-4000:], flush=True)
            return Part(TWO, FAILED, time.monotonic() - start, f"exit code {code}")
        differs = difference(one, two)
    return Part(TWO, FAILED if differs else OK, time.monotonic() - start, differs or "equal to one GPU")


def difference(one: Path, two: Path) -> str:
    """How two runs differ in weights or captures, or nothing."""
    import torch
    from safetensors.torch import load_file

    import hookrun

    runs = [hookrun.open_run(path) for path in (one, two)]
    rows = [len(each.captures["seen"]["relu1"]) for each in runs]
    if rows[0] != rows[1]:
        return f"{rows[0]} captured rows on one GPU, {rows[1]} on two"
    weights = [load_file(path / "checkpoints/last.safetensors") for path in (one, two)]
    for name, value in weights[0].items():
        if not torch.allclose(value, weights[1][name], rtol=1e-4, atol=1e-5):
            return f"{name} differs by {(value - weights[1][name]).abs().max().item():.2g}"
    return ""


def bench(device: str) -> tuple[Part, Any]:
    """The rows of `scripts/bench device` as plain values."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "bench.json")
        command = ["-m", "benchmarks", "device", "--json", str(out)]
        code, said, seconds = run(command, device, LIMITS[BENCH])
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    print(said, flush=True)
    missed = [row["work"] for row in found["rows"] if row["reached"] is False] if found else []
    what = f"misses its target: {'; '.join(missed)}" if missed else "targets reached"
    return Part(BENCH, FAILED if code or found is None else OK, seconds, what), found


def run(arguments: Sequence[str], device: str, limit: int) -> tuple[int, str, float]:
    """The exit code of Python with these arguments, what it said, and its seconds; 124: it was stopped at the limit."""
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "HOOKRUN_TEST_DEVICE": device,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        said = (
            error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        )
        return 124, f"{said}\nstopped after {limit} s", time.monotonic() - start
    return done.returncode, done.stdout, time.monotonic() - start


def told(part: Part) -> None:
    """Print the line of a part."""
    print(f"{part.result:<9} {part.name:<9} {part.seconds:6.1f} s  {part.what}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
