"""For your own tests of actions and functions: a tiny model, a tiny run, and what the hooks of one call saw."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.types import Quote, QuotedString
from torch import nn

from hookrun.api import hooked, open_run
from hookrun.cli import main
from hookrun.engine.spec import Spec
from hookrun.engine.values.containers import tensors
from hookrun.errors import HookrunError
from hookrun.store.reader import Run

__all__ = ["HookedCall", "records", "tiny_model", "tiny_run"]

_SETTINGS = (
    "model=mlp",
    "data=digits",
    "data.batch_size=8",
    "train.epochs=2",
    "train.limit_batches=2",
    "compute.device=cpu",
    "+hooks.features={select: layers, hook: forward, action: capture}",
    "+hooks.gradients={select: fc, hook: backward, action: stats}",
)


@dataclass(frozen=True)
class HookedCall:
    """What one call of a model under hooks returned, and what the hooks saw.

    output:   what the model returned
    records:  what print, stats and check emitted, in order: flat dicts
    captures: hook name -> module path -> captured values, one for each firing
    fired:    (hook name, module path) -> how often
    """

    output: Any
    records: list[dict[str, Any]]
    captures: Mapping[str, Mapping[str, list[Any]]]
    fired: Mapping[tuple[str, str], int]


def tiny_model() -> nn.Sequential:
    """A network from [batch, 4] to [batch, 3]: `fc1` (Linear), `relu1` (ReLU), `fc2` (Linear).

    It is in training mode and on the CPU. Each call returns a new model with the same weights, and draws from none of
    the global generators.
    """
    generator = torch.Generator().manual_seed(0)
    layers = {
        "fc1": nn.utils.skip_init(nn.Linear, 4, 8, device="cpu"),
        "relu1": nn.ReLU(),
        "fc2": nn.utils.skip_init(nn.Linear, 8, 3, device="cpu"),
    }
    model = nn.Sequential(OrderedDict(layers))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


def tiny_run(path: str | Path) -> Run:
    """Train a small network on a few digits under two hooks, in this process, and return the finished run.

    The hook `features` captures the output of `layers`, 64 features for each sample; `gradients` records statistics
    of the gradients of `fc`. The directory has all files of a run, such as its configuration, metrics and checkpoints.

    path: a new or empty directory; as for every run, the link `latest` beside it points to it

    Raises HookrunError with the messages of the run if it fails, e.g. because the directory has a run.
    """
    folder = Path(path).expanduser().absolute()
    quoted = QuotedString(str(folder), Quote.single).with_quotes()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as messages:
        code = main([*_SETTINGS, f"hydra.run.dir={quoted}"])
    if code:
        raise HookrunError(f"the tiny run in {folder} ended with exit code {code}\n{messages.getvalue()}")
    return open_run(folder)


def records(
    model: nn.Module, hooks: Spec | Mapping[str, Any], /, *inputs: Any, **named_inputs: Any
) -> HookedCall:
    """Call ``model(*inputs, **named_inputs)`` once under the hooks; afterwards the model has no hooks.

    If a hook needs a backward pass, there is one from the sum of all outputs that require a gradient. It adds to the
    `grad` of the parameters, where your test can read it. There is no optimizer step.

    hooks: the mapping from name to hook, as in YAML, or a spec; the action `python` also takes a function itself

    Raises SpecError for a mistake in the mapping, CompileError for a hook that does not fit the model, HookError for an
    action that fails, CheckFailed for a check with policy `error`. Warns (HookrunWarning) of a hook that did nothing.
    """
    with hooked(model, hooks) as installed:
        output = model(*inputs, **named_inputs)
        if any(site.hook_type.needs_backward for site in installed.sites):
            torch.autograd.backward([tensor.sum() for tensor in tensors(output) if tensor.requires_grad])
    return HookedCall(output, installed.records, installed.captures, installed.fired)
