"""The door for whoever adds to hookrun: actions, hook types, selector forms, tasks, loggers, sections of the page.

An extension is a module of an installed package, named in its ``pyproject.toml``::

    [project.entry-points."hookrun.extensions"]
    soft_clamp = "mypkg.soft_clamp"

What the module defines is found by its class: a subclass of `Action` is an action, one of `Selector` a selector form,
and so on. A name, prefix or id that is taken is refused. Installing the package is the consent: its code runs in
every command. A module of actions, selector forms or tasks is imported to validate a configuration; import torch inside
its functions, so that a mistake is told without it.

hookrun/README.md has a complete recipe for each kind. In short:

**An action** changes or observes a value; its fields are its keys in YAML::

    from hookrun.extend import Action, Edit, HookSite, Number

    class SoftClamp(Action):
        \"""Limit every element smoothly to the range from -limit to limit.\"""

        action_name = "soft_clamp"
        limit: Number

        def build(self, site: HookSite) -> Edit:
            return lambda x: (x / self.limit).tanh() * self.limit

A field may also be a `Value` (a number, a tensor of a file or another run; ``site.operand("factor")`` gives it), a
`Seed` (of random numbers: ``uses = ("drawn",)`` declares them, and ``site.drawn(x, fill)`` draws them), or
``OneOrMore[str]``. Raise `HookError` for a value that it cannot act on.

**A hook type** is a record, and the class that registers it with torch::

    from hookrun.extend import HookType, ModuleHook

    BUFFERS = HookType("buffers", fires="after the forward", sees="the buffers", on="module", phase="forward")

    class Buffers(ModuleHook):
        hook_types = (BUFFERS,)
        depth = 1

        def after(self, module):
            yield module.register_forward_hook(self.see)

`self.firings` are its `BoundHook`\\ s: ``firing.op(value)`` runs the actions. `ParameterHook` is the base for hooks on
parameters.

**A selector form** parses a text and finds paths in a `Tree`::

    from hookrun.extend import Parser, Selector, Tree

    class DepthSelector(Selector):
        prefix = "depth:"
        ...

**A task** runs the model under the hooks (`TaskOfOneSplit`, `TaskOfSplits`, or `TaskUnderHooks` for the rest)::

    from hookrun.extend import Batches, RunContext, TaskOfOneSplit

    class SpeedTask(TaskOfOneSplit):
        task_name = "speed"

        def perform(self, context: RunContext) -> None: ...

**A section of the page** is a `ReportSection` with a function of the `RunData`, and a template beside the module::

    from hookrun.extend import ReportSection, RunData, Series, lines

    SECTION = ReportSection("loss", "Loss", build, "mypkg:loss.html")

Figures: `lines` of `Series`, `bars`, `HeatMap`; each gives a `Figure`, which the template prints.

**A logger** is a `RunLogger`, chosen by ``task.loggers=[csv]``::

    from hookrun.extend import RunLogger

    class CsvLogger(RunLogger):
        logger_name = "csv"

        def __init__(self, run):
            self.file = open(run.path / "metrics.csv", "a")

        def metrics(self, split, values, step, of=None): ...
        def close(self, *, failed): ...

Mistakes of a user are a `Problem` (where, what, the next step); ``raise spec_error(where, what, hint)`` tells one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hookrun.errors import HookError, Problem, spec_error

if TYPE_CHECKING:
    from hookrun.engine.actions.base import Action, Edit, HookSite
    from hookrun.engine.actions.fields import Number, OneOrMore, Seed
    from hookrun.engine.actions.values import Value
    from hookrun.engine.hook_types import HookType
    from hookrun.engine.runtime.hooks.base import BoundHook, ModuleHook, ParameterHook
    from hookrun.engine.spec.selector.base import Parser, Selector
    from hookrun.engine.spec.selector.tree import Tree
    from hookrun.report.draw.charts import Figure, Series, bars, lines
    from hookrun.report.draw.pictures import HeatMap
    from hookrun.report.facts import RunData
    from hookrun.report.sections import ReportSection
    from hookrun.run.passes.batches import Batches
    from hookrun.run.passes.context import RunContext
    from hookrun.run.passes.loggers import RunLogger
    from hookrun.run.tasks.under_hooks import TaskOfOneSplit, TaskOfSplits, TaskUnderHooks

__all__ = [
    "Action",
    "Batches",
    "BoundHook",
    "Edit",
    "Figure",
    "HeatMap",
    "HookError",
    "HookSite",
    "HookType",
    "ModuleHook",
    "Number",
    "OneOrMore",
    "ParameterHook",
    "Parser",
    "Problem",
    "ReportSection",
    "RunContext",
    "RunData",
    "RunLogger",
    "Seed",
    "Selector",
    "Series",
    "TaskOfOneSplit",
    "TaskOfSplits",
    "TaskUnderHooks",
    "Tree",
    "Value",
    "bars",
    "lines",
    "spec_error",
]

_HOMES = {
    "hookrun.engine.actions.base": ("Action", "Edit", "HookSite"),
    "hookrun.engine.actions.fields": ("Number", "OneOrMore", "Seed"),
    "hookrun.engine.actions.values": ("Value",),
    "hookrun.engine.hook_types": ("HookType",),
    "hookrun.engine.runtime.hooks.base": ("BoundHook", "ModuleHook", "ParameterHook"),
    "hookrun.engine.spec.selector.base": ("Parser", "Selector"),
    "hookrun.engine.spec.selector.tree": ("Tree",),
    "hookrun.errors": ("HookError", "Problem", "spec_error"),
    "hookrun.report.draw.charts": ("Figure", "Series", "bars", "lines"),
    "hookrun.report.draw.pictures": ("HeatMap",),
    "hookrun.report.facts": ("RunData",),
    "hookrun.report.sections": ("ReportSection",),
    "hookrun.run.passes.batches": ("Batches",),
    "hookrun.run.passes.context": ("RunContext",),
    "hookrun.run.passes.loggers": ("RunLogger",),
    "hookrun.run.tasks.under_hooks": ("TaskOfOneSplit", "TaskOfSplits", "TaskUnderHooks"),
}
"""Module -> the names that it defines; it is imported when one of them is first used."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'hookrun.extend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
