"""The hooks of a bundle on a model that an evaluation harness made, for as long as the harness has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import finalize

from torch import nn

from hookrun.api import compile, load_bundle
from hookrun.engine.runtime import Installation
from hookrun.engine.spec.hook import HookSpec
from hookrun.errors import CompileError, Problem, refuse


def install_bundle(
    bundle: str | Path, model: nn.Module, owner: Any
) -> tuple[Installation, Callable[[], object]]:
    """Install the hooks of a bundle; returns them, and a function that removes them.

    owner: the harness's object that has the model; the hooks are removed with it, or when Python ends

    Raises SpecError for a broken bundle, CompileError for hooks that do not fit the model, or need what a harness does
    not say.
    """
    plan = compile(load_bundle(str(bundle)), model)
    refuse((problem for hook in plan.hooks for problem in _unknown_here(hook.spec)), CompileError)
    hooks = plan.install(model)
    hooks.__enter__()
    return hooks, finalize(owner, hooks.__exit__, None, None, None)


def _unknown_here(spec: HookSpec) -> Iterator[Problem]:
    """A problem for each part of the hook that needs what a harness does not say."""
    when = spec.keys.when
    tokens = spec.keys.tokens
    for key in ("step", "epoch"):
        if getattr(when, key) is not None:
            yield Problem(f"{spec.where}.when.{key}", f"a harness has no {key}", f"leave `{key}` out")
    for key in spec.action.ramps():
        yield Problem(f"{spec.where}.{key}", "a harness has no step", "give a number")
    if tokens is not None and tokens.span is not None:
        yield Problem(f"{spec.where}.tokens.span", "a harness does not say where spans are", "give positions")
