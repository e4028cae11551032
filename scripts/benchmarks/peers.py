"""The same work done by other libraries. Each function imports its library, and may raise if that cannot do it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.by_hand import kept_by
from benchmarks.measure import Outputs, Run, Ways
from benchmarks.models import Subject

CAPTURING = ("captum", "nnsight", "pyvene", "timm")


def add_captures(ways: Ways, subject: Subject, names: Sequence[str], *, wanted: bool) -> None:
    """Add all libraries that capture outputs of any module. torchlens runs in its own process: see `works.peers`."""
    for name in CAPTURING:
        make = globals()[f"{name}_captures"]
        ways.peer(name, name, lambda make=make: make(subject, names), wanted=wanted)


def captum_captures(subject: Subject, names: Sequence[str]) -> tuple[Run, Outputs]:
    """captum's LayerActivation of all layers at once."""
    from captum.attr import LayerActivation

    model = subject.make()
    layers = [model.get_submodule(name) for name in names]
    found = LayerActivation(model, layers)

    def outputs() -> dict[str, Any]:
        values = found.attribute(subject.x)
        return {name: _plain(value) for name, value in zip(names, values, strict=True)}

    return lambda: found.attribute(subject.x), outputs


def nnsight_captures(subject: Subject, names: Sequence[str]) -> tuple[Run, Outputs]:
    """One trace of nnsight that saves all outputs."""
    import nnsight

    model = nnsight.NNsight(subject.make())
    envoys = [model.get(name) for name in names]
    x = subject.x

    def run() -> Any:
        with model.trace(x):
            values = [each.output for each in envoys].save()
        return values

    return run, lambda: {name: _plain(value) for name, value in zip(names, run(), strict=True)}


def nnsight_edit(subject: Subject, names: Sequence[str], edit: Callable[[Any], Any]) -> tuple[Run, Outputs]:
    """One trace of nnsight that replaces outputs."""
    import nnsight

    model = nnsight.NNsight(subject.make())
    envoys = [model.get(name) for name in names]
    x = subject.x

    def run() -> Any:
        with model.trace(x):
            for each in envoys:
                each.output = edit(each.output)
            result = model.output.save()
        return result

    return run, lambda: {"output": logits(run())}


def pyvene_captures(subject: Subject, names: Sequence[str]) -> tuple[Run, Outputs]:
    """A pyvene intervention at each output that keeps it."""
    kept: dict[str, list[Any]] = {name: [] for name in names}

    def keeper(name: str) -> Callable[..., Any]:
        def keep(base: Any, source: Any = None, subspaces: Any = None) -> Any:
            kept[name].append(base)
            return base

        return keep

    run = _pyvene(subject, [(name, keeper(name)) for name in names])
    return kept_by(kept, run)


def pyvene_edit(subject: Subject, names: Sequence[str], edit: Callable[[Any], Any]) -> tuple[Run, Outputs]:
    """A pyvene intervention at each output that changes it."""
    run = _pyvene(subject, [(name, lambda base, source=None, subspaces=None: edit(base)) for name in names])
    return run, lambda: {"output": logits(run())}


def _pyvene(subject: Subject, interventions: Sequence[tuple[str, Callable[..., Any]]]) -> Callable[[], Any]:
    import pyvene

    model = subject.make()
    # pyvene needs one, and takes numbered children only below a named module
    if not hasattr(model, "config"):
        model = named(model)
        interventions = [(f"net.{name}", function) for name, function in interventions]
        argument = "x"
    else:
        argument = subject.argument
    wanted = [
        {"component": _bracketed(name) + ".output", "intervention": function}
        for name, function in interventions
    ]
    hooked = pyvene.IntervenableModel(wanted, model=model)
    return lambda: hooked({argument: subject.x})[1]


def named(model: Any) -> Any:
    """The model as child `net` of a module with the attribute `config` that pyvene needs."""
    from torch import nn

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model
            self.config = SimpleNamespace(to_dict=dict)

        def forward(self, x: Any) -> Any:
            return self.net(x)

    return Named()


def _bracketed(name: str) -> str:
    return re.sub(r"\.(\d+)", r"[\1]", name)


def timm_captures(subject: Subject, names: Sequence[str]) -> tuple[Run, Outputs]:
    """timm's feature hooks, which keep references."""
    from timm.models._features import FeatureHooks

    model, device = subject.make(), subject.x.device
    hooks = FeatureHooks([{"module": name} for name in names], model.named_modules())

    def forward() -> Any:
        model(subject.x)
        return hooks.get_output(device)

    return forward, lambda: {name: _plain(value).clone() for name, value in forward().items()}


def bridge(subject: Subject) -> Any:
    """TransformerLens's bridge to a transformers model; its configuration is read from a folder, not downloaded."""
    from transformer_lens.model_bridge import TransformerBridge

    model = subject.make()
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, hf_model=model, load_weights=False)


def logits(output: Any) -> Any:
    """The logits of a model output, or its only tensor."""
    return _plain(getattr(output, "logits", output))


def _plain(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value
