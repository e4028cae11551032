"""What hooks cost: interleaved rounds of bare PyTorch, hand-written hooks and hookrun; medians of per-round ratios.

Absolute times differ between machines and moments; a ratio of two runs side by side does not. `mlp` is 8 Linear layers
of width 64 with ReLU at batch 32, where dispatch is all there is; resnet18 runs 8 images of 224x224.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

Run = Callable[[], object]


def ratios(cases: dict[str, Run], rounds: int, seconds: float) -> dict[str, tuple[float, float]]:
    """For each case its median time in µs, and the median over the rounds of its ratio to the first case."""
    names = list(cases)
    for run in cases.values():
        run()
    first = cases[names[0]]
    start = time.perf_counter()
    first()
    repeats = max(1, int(seconds / rounds / len(names) / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(rounds):
        for name in names if round_number % 2 else reversed(names):  # whoever comes first has no advantage
            run = cases[name]
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            times[name].append((time.perf_counter() - start) / repeats)
    bare = times[names[0]]
    return {
        name: (
            statistics.median(times[name]) * 1e6,
            statistics.median(mine / base for mine, base in zip(times[name], bare, strict=True)),
        )
        for name in names
    }


def show(title: str, results: dict[str, tuple[float, float]], target: str) -> None:
    """One block of the table."""
    print(f"\n{title}    target: {target}")
    for name, (micros, ratio) in results.items():
        print(f"  {name:<28}{micros:>12.1f} µs{ratio:>9.3f}")


# ---- hooks -----------------------------------------------------------------------------------------------------


def mlp() -> Any:
    """8 Linear layers of width 64 with ReLU between them: 15 leaves."""
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def leaves(model: Any, cls: type | None = None) -> list[tuple[str, Any]]:
    """The modules without children, by name, in order."""
    found = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    return [(name, module) for name, module in found if cls is None or isinstance(module, cls)]


def captures_by_hand(model: Any, clone: bool) -> Callable[[], None]:
    """Every leaf's output, each firing kept: by reference, which an in-place successor overwrites, or as a clone."""
    kept: dict[str, list[Any]] = {name: [] for name, _ in leaves(model)}

    def hook(name: str, module: Any, args: Any, output: Any) -> None:
        kept[name].append(output.detach().clone() if clone else output.detach())

    for name, module in leaves(model):
        module.register_forward_hook(partial(hook, name))
    return lambda: [values.clear() for values in kept.values()] and None


def edits_by_hand(model: Any, cls: type, edit: Callable[[Any], Any]) -> None:
    """A hook that returns another output."""
    for _, module in leaves(model, cls):
        module.register_forward_hook(lambda module, args, output: edit(output))


def gradients_by_hand(model: Any, path: str) -> None:
    """See the gradient of one activation: a full backward hook."""
    seen: list[Any] = []
    hook = lambda module, grad_input, grad_output: seen.__setitem__(slice(None), grad_output)  # noqa: E731
    model.get_submodule(path).register_full_backward_hook(hook)


def hooks_bench(rounds: int, seconds: float) -> None:
    """Dispatch and edits."""
    import torch
    from torch import nn

    import hookrun

    torch.set_num_threads(1)
    stack = ExitStack()

    def hooked(model: Any, **hook: Any) -> Any:
        return stack.enter_context(hookrun.hooked(model, {"bench": {"hook": "forward", **hook}}))

    def kept(run: Run, clear: Callable[[], None]) -> Run:
        def run_and_forget() -> None:
            run()
            clear()

        return run_and_forget

    def capture_cases(make: Callable[[], Any], x: Any) -> dict[str, Run]:
        bare, by_hand, cloned, ours = make(), make(), make(), make()
        clear, clear_clones = captures_by_hand(by_hand, clone=False), captures_by_hand(cloned, clone=True)
        hooks = hooked(ours, select={"path": "**", "leaf": True}, action="capture")
        lists = [values for by_module in hooks.captures.values() for values in by_module.values()]
        return {
            "bare": kept(lambda: bare(x), lambda: None),
            "hand-written, reference": kept(lambda: by_hand(x), clear),
            "hand-written, clone": kept(lambda: cloned(x), clear_clones),
            "hookrun": kept(lambda: ours(x), lambda: [values.clear() for values in lists] and None),
        }

    def edit_cases(cls: type, edit: Callable[[Any], Any], x: Any, **hook: Any) -> dict[str, Run]:
        bare, by_hand, ours = mlp(), mlp(), mlp()
        edits_by_hand(by_hand, cls, edit)
        hooked(ours, select=f"type:{cls.__name__}", **hook)
        return {"bare": lambda: bare(x), "hand-written": lambda: by_hand(x), "hookrun": lambda: ours(x)}

    def gradient_cases(x: Any) -> dict[str, Run]:
        def step(model: Any) -> Run:
            return lambda: model(x).sum().backward()

        bare, by_hand, ours = mlp(), mlp(), mlp()
        gradients_by_hand(by_hand, "7")
        seen = hooked(ours, select="7", hook="output_grad", action="capture").captures["bench"]["7"]
        return {
            "bare": step(bare),
            "full backward hook": step(by_hand),
            "hookrun output_grad": kept(step(ours), seen.clear),
        }

    x = torch.randn(32, 64)
    run = partial(ratios, rounds=rounds, seconds=seconds)
    with stack:
        show("mlp, capture all 15 leaves, training", run(capture_cases(mlp, x)), "≤ hand-written")
        with torch.no_grad():
            show("mlp, capture all 15 leaves, inference", run(capture_cases(mlp, x)), "≤ hand-written, 1.30")
            clamp = edit_cases(nn.ReLU, lambda output: output.clamp(0, 1), x, action="clamp", min=0, max=1)
            show("mlp, clamp 7 ReLU outputs, inference", run(clamp), "≤ hand-written, 1.25")
            scale = edit_cases(nn.Linear, lambda output: output * 2.0, x, action="scale", factor=2.0)
            show("mlp, scale 8 Linear outputs, inference", run(scale), "≤ hand-written, 1.33")
        scale = edit_cases(nn.Linear, lambda output: output * 2.0, x, action="scale", factor=2.0)
        show("mlp, scale 8 Linear outputs, training forward", run(scale), "≤ hand-written")
        show("mlp, the gradient of one activation, forward + backward", run(gradient_cases(x)), "1.06")
        torch.set_num_threads(2)
        from torchvision.models import resnet18

        images = torch.randn(8, 3, 224, 224)
        with torch.no_grad():
            cases = capture_cases(lambda: resnet18(num_classes=10).eval(), images)
            show(
                "resnet18, capture 60 leaves, inference",
                ratios(cases, max(rounds // 4, 5), seconds * 3),
                "≤ 1.03",
            )


# ---- start-up and selectors ------------------------------------------------------------------------------------

BARE_HYDRA = """
import hydra
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg): pass
main()
"""


def seconds_of(command: Sequence[str]) -> float:
    """The wall time of one process."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.perf_counter() - start


def start_bench(rounds: int) -> None:
    """Whole processes: help and configuration against a bare Hydra application, a run against its imports."""
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder, "app.py")
        app.write_text(BARE_HYDRA)
        Path(folder, "conf").mkdir()
        Path(folder, "conf", "config.yaml").write_text("seed: 0\n")
        imports = "import torch, hydra; from sklearn.datasets import load_digits; load_digits()"
        hookrun = [sys.executable, "-m", "hookrun"]
        pairs = {
            "--help": ([sys.executable, str(app), "--help"], [*hookrun, "--help"], 1.5),
            "--cfg job": ([sys.executable, str(app), "--cfg", "job"], [*hookrun, "--cfg", "job"], 1.5),
            "first batch on digits": (
                [sys.executable, "-c", imports],
                [*hookrun, "experiment=clip_fc", "train.steps=1", "train.limit_batches=1"],
                1.3,
            ),
        }
        for name, (bare, ours, target) in pairs.items():
            seconds_of(bare), seconds_of(ours)
            times = [(seconds_of(bare), seconds_of(ours)) for _ in range(rounds)]
            ratio = statistics.median(mine / base for base, mine in times)
            base, mine = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"{name:<24}{base:8.2f} s bare{mine:8.2f} s hookrun{ratio:8.2f}    target: ≤ {target}")


def selectors_bench() -> None:
    """100 selectors against 5,000 module names."""
    from torch import nn

    import hookrun

    blocks = nn.ModuleList(
        nn.ModuleDict({name: nn.Identity() for name in ("attn", "mlp", "norm", "proj")}) for _ in range(1000)
    )
    model = nn.ModuleDict({"blocks": blocks})
    forms = (
        "blocks.{n}.*",
        "blocks[{n}:{m}].attn",
        "**.{n}.mlp",
        r"re:blocks\.{n}\..*",
        "blocks.{n}.{{attn,mlp}}",
    )
    names = [forms[n % len(forms)].format(n=n, m=n + 10) for n in range(100)]
    spec = {f"h{n}": {"select": name, "hook": "forward", "action": "print"} for n, name in enumerate(names)}
    hookrun.compile({}, model)  # its imports
    start = time.perf_counter()
    plan = hookrun.compile(spec, model)
    took = time.perf_counter() - start
    count = len(list(model.modules()))
    print(f"{len(plan.hooks)} selectors against {count:,} modules: {took:.2f} s    target: < 1 s")


# ---- captures --------------------------------------------------------------------------------------------------


def raw_write(folder: Path, batches: int, batch: Any) -> None:
    """The fastest way to disk: one file, one write for each batch, dropped from the cache as it goes."""
    with open(folder / "raw", "wb", buffering=0) as file:
        for _ in range(batches):
            file.write(memoryview(batch.numpy()).cast("B"))
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.fsync(file.fileno())


def buffered_write(folder: Path, batches: int, batch: Any) -> None:
    """One file, flushed at its end."""
    with open(folder / "raw", "wb", buffering=0) as file:
        for _ in range(batches):
            file.write(memoryview(batch.numpy()).cast("B"))
        os.fsync(file.fileno())


def one_file_each(save: Callable[[Path, Any], object]) -> Callable[[Path, int, Any], None]:
    """A file for each batch, each flushed."""

    def write(folder: Path, batches: int, batch: Any) -> None:
        for number in range(batches):
            path = folder / f"{number}.npy"
            save(path, batch)
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    return write


def h5py_write(folder: Path, batches: int, batch: Any) -> None:
    """One growing data set."""
    import h5py

    with h5py.File(folder / "data.h5", "w") as file:
        shape = (batches * len(batch), *batch.shape[1:])
        rows = file.create_dataset("rows", shape, chunks=tuple(batch.shape), dtype="f4")
        for number in range(batches):
            rows[number * len(batch) : (number + 1) * len(batch)] = batch.numpy()
        file.flush()
    with open(folder / "data.h5", "rb") as file:
        os.fsync(file.fileno())


def zarr_write(folder: Path, batches: int, batch: Any) -> None:
    """One array in chunks of a batch, without compression."""
    import zarr

    shape = (batches * len(batch), *batch.shape[1:])
    rows = zarr.create_array(
        str(folder / "data.zarr"), shape=shape, chunks=tuple(batch.shape), dtype="f4", compressors=None
    )
    for number in range(batches):
        rows[number * len(batch) : (number + 1) * len(batch)] = batch.numpy()
    for path in (folder / "data.zarr").rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def hookrun_write(folder: Path, batches: int, batch: Any) -> None:
    """As a run does."""
    from hookrun.store.writer import CaptureWriter

    writer = CaptureWriter(folder / "captures")
    for number in range(batches):
        ids = range(number * len(batch), (number + 1) * len(batch))
        writer.add("h", "m", batch, sample_ids=ids, epoch=0, step=number, call=0)
    writer.close()


def capture_bench(rounds: int) -> None:
    """Streams 1 GB of activations to disk, flushed; then the same behind 15 ms of compute for each batch."""
    import importlib.util
    import shutil

    import numpy as np
    import torch

    batch = torch.randn(64, 256, 8, 8)  # 4 MB
    batches = 256
    ways: dict[str, Callable[[Path, int, Any], None]] = {
        "raw, dropped as it goes": raw_write,
        "raw, buffered": buffered_write,
        "torch.save": one_file_each(lambda path, rows: torch.save(rows, path)),
        "np.save": one_file_each(lambda path, rows: np.save(path, rows.numpy())),
        "hookrun": hookrun_write,
    }
    for name, write in {"h5py": h5py_write, "zarr": zarr_write}.items():
        if importlib.util.find_spec(name) is not None:
            ways[name] = write
    size = batches * batch.numel() * 4 / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, write in ways.items():
                place = Path(folder) / "run"
                place.mkdir()
                start = time.perf_counter()
                write(place, batches, batch)
                seconds[name].append(time.perf_counter() - start)
                shutil.rmtree(place)
    print(f"\nstream {size:.0f} MB to disk, flushed    target: 1.2 x the fastest raw write")
    fastest = [min(pair) for pair in zip(*(seconds[name] for name in list(ways)[:2]), strict=True)]
    for name, times in seconds.items():
        ratio = statistics.median(mine / raw for mine, raw in zip(times, fastest, strict=True))
        print(f"  {name:<28}{size / statistics.median(times):>9.0f} MB/s{ratio:>9.3f}")
    behind_compute(batch, batches, rounds)


def behind_compute(batch: Any, batches: int, rounds: int) -> None:
    """The same behind 15 ms of compute for each batch, against the compute alone."""
    import torch

    from hookrun.store.writer import CaptureWriter

    matrix = torch.randn(512, 512)
    start = time.perf_counter()
    for _ in range(20):
        torch.mm(matrix, matrix)
    steps = max(1, int(0.015 / ((time.perf_counter() - start) / 20)))

    def computed(writer: CaptureWriter | None) -> float:
        start = time.perf_counter()
        for number in range(batches):
            for _ in range(steps):
                torch.mm(matrix, matrix)
            if writer is not None:
                ids = range(number * len(batch), (number + 1) * len(batch))
                writer.add("h", "m", batch, sample_ids=ids, epoch=0, step=number, call=0)
        if writer is not None:
            writer.close()
        return time.perf_counter() - start

    found = list[float]()
    for _ in range(rounds):
        alone = computed(None)
        with tempfile.TemporaryDirectory() as folder:
            found.append(computed(CaptureWriter(Path(folder) / "captures")) / alone)
    print(f"\nthe same under 15 ms of compute for each batch: {statistics.median(found):.3f}    target: 1.15")


def main() -> None:
    """Run one part, or all."""
    parser = argparse.ArgumentParser(
        description="Cost of hooks, start-up and selectors, as ratios within one run."
    )
    parser.add_argument(
        "part", nargs="?", choices=["hooks", "start", "selectors", "capture"], help="all of them unless given"
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="interleaved rounds (start-up: an eighth of it)"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="about so long for each block of hooks")
    args = parser.parse_args()
    if args.part in (None, "selectors"):
        selectors_bench()
    if args.part in (None, "start"):
        start_bench(max(args.rounds // 8, 3))
    if args.part in (None, "hooks"):
        hooks_bench(args.rounds, args.seconds)
    if args.part in (None, "capture"):
        capture_bench(max(args.rounds // 8, 3))


if __name__ == "__main__":
    main()
