"""How a run ends: its last writes are made even after an error, its status tells how it failed, its hooks are counted.

model.json and hooks.json are made here too, and the lines that a run prints at its end.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from hookrun.engine.plan.model_tree import ModelNames, class_name
from hookrun.engine.plan.plan import SHOWN
from hookrun.engine.plan.table import size
from hookrun.engine.runtime import Installation
from hookrun.errors import HookrunError, counted, listed
from hookrun.signals import code_of, interruption_kept, shielded
from hookrun.store.files import StoreError
from hookrun.store.run_dir import RunDir

if TYPE_CHECKING:
    from hookrun.run.passes.context import RunContext


@contextmanager
def ending(*last: Callable[[], None]) -> Iterator[None]:
    """Call all of these after the block, even if it raises. After a first error, StoreErrors are only printed."""
    left = list(last)
    try:
        yield
        while left:
            left.pop(0)()
    except BaseException:
        for each in left:
            print_failure(each)
        raise


@contextmanager
def in_this_process() -> Iterator[None]:
    """A block that calls a user's code. A child that is forked in it ends with it: the run is its parent's."""
    owner = os.getpid()
    code: object = None
    try:
        yield
    except BaseException as error:
        if os.getpid() == owner:
            raise
        code = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
    if os.getpid() != owner:
        print(end="", flush=True)
        os._exit(code if isinstance(code, int) else code is not None)


@contextmanager
def failure_recorded(run_dir: RunDir) -> Iterator[None]:
    """Write an exception of the block to status.json before it is raised, even if several signals arrive."""
    try:
        try:
            with interruption_kept():
                yield
        except BaseException as error:
            _record_failure(run_dir, error)
            raise
    except KeyboardInterrupt as interruption:
        # in case a second signal arrived before the first was recorded
        _record_failure(run_dir, interruption)
        raise


def _record_failure(run_dir: RunDir, error: BaseException) -> None:
    with shielded():
        if not run_dir.ended:
            print_failure(partial(set_failed, run_dir, error))


def print_failure(write: Callable[[], None]) -> None:
    """Call `write`; a StoreError is printed and not raised."""
    try:
        write()
    except StoreError as error:
        print(error, file=sys.stderr, flush=True)


def set_failed(run_dir: RunDir, error: BaseException) -> None:
    """Set the status of the run to `failed` or `interrupted`, with the reason."""
    if isinstance(error, KeyboardInterrupt):
        run_dir.set_status("interrupted", str(error) or "interrupted from the keyboard", code_of(error))
    elif isinstance(error, HookrunError):
        run_dir.set_status("failed", str(error), error.exit_code)
    else:
        run_dir.set_status("failed", f"{type(error).__name__}: {error}")


def model_facts(model: nn.Module, weights: str | None = None) -> dict[str, Any]:
    """Each module once, in the order of `named_modules`: path, all its names, class, count of parameters in its tree.

    weights: the source of the model's weights; None: not known
    """
    names = ModelNames(model)
    matches = [names.match(path, on_parameters=False) for path, _ in model.named_modules()]
    modules = [
        {"path": match.path, "names": list(match.names), "class": match.type, "parameters": match.parameters}
        for match in matches
    ]
    facts: dict[str, Any] = {"class": class_name(model)}
    if weights is not None:
        facts["weights"] = weights
    return {**facts, "modules": modules}


def hook_facts(hooks: Installation) -> dict[str, Any]:
    """For each hook at each module: how often it fired, elements it changed on logged steps, why it did not fire.

    In a training also `by_step`: [step, changed elements, all elements] of logged steps, evenly spaced, in which it
    edited something.
    """
    silent = {(hook, path): why for hook, path, why in hooks.inactive}
    sites: list[dict[str, Any]] = []
    for site in hooks.sites:
        facts = {
            "hook": site.hook_name,
            "module": site.path,
            "fired": site.firings,
            "changed": int(site.changed),
            "total": site.total,
            "silent": silent.get((site.hook_name, site.path)),
        }
        if site.by_step:
            facts["by_step"] = site.by_step
        sites.append(facts)
    return {"sites": sites}


def hook_lines(context: RunContext) -> Iterator[str]:
    """Lines for each hook: how often it fired on each module, and how much it changed, captured or counted."""
    facts = hook_facts(context.hooks)["sites"]
    for planned in context.hooks.plan.hooks:
        hook = planned.spec
        counts: list[str] = []
        changed = total = 0
        for site in facts:
            if site["hook"] == hook.name:
                counts.append(f"{site['module'] or '(root)'} x{site['fired']}")
                changed += site["changed"]
                total += site["total"]
        name = f"{hook.name} ({hook.hook_type}, {hook.action.action_name})"
        if not counts:
            yield f"{name} did not fire: it matches nothing in this model, as `expect: {hook.keys.expect}` allows"
            continue
        yield f"{name} fired: {listed(counts, SHOWN)}"
        if total:
            yield f"    changed {changed:,} of {total:,} elements ({changed / total:.1%}) on the logged steps"
        if hook.action.captures:
            tensors = captured = 0
            for (name, _), count in context.run_dir.captures.counts.items():
                if name == hook.name:
                    tensors += count.tensors
                    captured += count.bytes
            yield f"    captured {counted(tensors, 'tensor')}, {size(captured)}"
        if counted_bytes := context.sink.bytes[hook.name]:
            yield f"    counted {size(counted_bytes)}"
