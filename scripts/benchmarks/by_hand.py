"""Hand-written hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from benchmarks.measure import Outputs, Run
from benchmarks.models import leaves


def captures(model: Any, names: Iterable[str], x: Any, *, clone: bool) -> tuple[Run, Outputs]:
    """Forward hooks that keep the outputs: by reference, which in-place successors overwrite, or as clones."""
    kept: dict[str, list[Any]] = {name: [] for name in names}

    def hook(name: str, module: Any, args: Any, output: Any) -> None:
        kept[name].append(output.detach().clone() if clone else output.detach())

    for name in kept:
        model.get_submodule(name).register_forward_hook(partial(hook, name))
    return kept_by(kept, lambda: model(x))


def kept_by(kept: dict[str, list[Any]], forward: Run) -> tuple[Run, Outputs]:
    """Two functions: a forward that drops what was kept, and one that returns the outputs of modules that ran once."""

    def run() -> None:
        forward()
        for values in kept.values():
            values.clear()

    def outputs() -> dict[str, Any]:
        forward()
        found = {name: values[0].clone() for name, values in kept.items() if len(values) == 1}
        for values in kept.values():
            values.clear()
        return found

    return run, outputs


class Stop(Exception):
    """Ends a forward early."""


def early_exit(model: Any, path: str, x: Any) -> tuple[Run, Outputs]:
    """A forward hook that keeps a module's output and raises an exception, which the caller of the model catches."""
    kept: dict[str, list[Any]] = {path: []}

    def hook(module: Any, args: Any, output: Any) -> None:
        kept[path].append(output.detach().clone())
        raise Stop

    def forward() -> None:
        with suppress(Stop):
            model(x)

    model.get_submodule(path).register_forward_hook(hook)
    return kept_by(kept, forward)


def edits(model: Any, cls: type, edit: Callable[[Any], Any]) -> None:
    """Register a hook on each leaf of a class that returns the edited output."""
    for _, module in leaves(model, cls):
        module.register_forward_hook(lambda module, args, output: edit(output))


def statistics(model: Any, names: Iterable[str], x: Any) -> tuple[Run, Outputs]:
    """mean, std, min, max and norm of each output, as tensors, without synchronizing with the device.

    For the comparison they are computed in float64: torch's float32 norm of the millions of elements of a
    convolution's output is off by 2e-4.
    """
    seen: dict[str, tuple[Any, ...]] = {}
    compares = False

    def hook(name: str, module: Any, args: Any, output: Any) -> None:
        out = output.detach().double() if compares else output.detach()
        seen[name] = (out.mean(), out.std(), out.min(), out.max(), out.norm())

    for name in names:
        model.get_submodule(name).register_forward_hook(partial(hook, name))

    def outputs() -> dict[str, Any]:
        nonlocal compares
        compares = True
        model(x)
        compares = False
        keys = ("mean", "std", "min", "max", "norm")
        return {f"{name} {key}": seen[name][place] for name in seen for place, key in enumerate(keys)}

    return lambda: model(x), outputs
