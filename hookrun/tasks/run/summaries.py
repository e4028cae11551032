"""What is written and printed about hooks and model: model.json, hooks.json, and the lines at the end of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from hookrun.errors import counted, listed
from hookrun.plan.model_tree import ModelNames
from hookrun.plan.table import SHOWN, size
from hookrun.runtime import Installation
from hookrun.runtime.site import HookSite

if TYPE_CHECKING:
    from hookrun.tasks.run.context import RunContext


def model_facts(model: nn.Module, weights: str | None = None) -> dict[str, Any]:
    """Each module once, in the order of `named_modules`: path, all its names, class, count of parameters in its tree.

    weights: the source of the model's weights; None: not known
    """
    names = ModelNames(model)
    paths = dict.fromkeys(map(names.first_name, names.modules))
    matches = [names.match(path, on_parameters=False) for path in paths]
    return {
        "class": type(model).__name__,
        **({} if weights is None else {"weights": weights}),
        "modules": [
            {
                "path": match.path,
                "names": list(match.names),
                "class": match.type,
                "parameters": match.parameters,
            }
            for match in matches
        ],
    }


def hook_facts(hooks: Installation) -> dict[str, Any]:
    """For each hook at each module: how often it fired, elements it changed on logged steps, why it did not fire."""
    fired = hooks.fired
    silent = {(hook, path): why for hook, path, why in hooks.inactive}
    return {
        "sites": [
            {
                "hook": site.hook_name,
                "module": site.path,
                "fired": fired[site.hook_name, site.path],
                "changed": int(site.changed),
                "total": site.total,
                "silent": silent.get((site.hook_name, site.path)),
            }
            for site in hooks.sites
        ]
    }


def hook_lines(context: RunContext) -> Iterator[str]:
    """Lines for each hook: how often it fired on each module, and how much it changed, captured or counted."""
    by_hook = defaultdict[str, list[HookSite]](list)
    for site in context.hooks.sites:
        by_hook[site.hook_name].append(site)
    fired = context.hooks.fired
    for planned in context.hooks.plan.hooks:
        sites = by_hook[planned.spec.name]
        counts = [f"{site.path or '(root)'} x{fired[site.hook_name, site.path]}" for site in sites]
        what = f"{planned.spec.hook_type}, {planned.spec.action.action_name}"
        yield f"{planned.spec.name} ({what}) fired: {listed(counts, SHOWN)}"
        total = sum(site.total for site in sites)
        if total:
            changed = int(sum(int(site.changed) for site in sites))
            steps = "on the logged steps"
            yield f"    changed {changed:,} of {total:,} elements ({changed / total:.1%}) {steps}"
        if planned.spec.action.captures:
            kept = [
                count for key, count in context.run_dir.captures.counts.items() if key[0] == planned.spec.name
            ]
            tensors, count = sum(each.tensors for each in kept), sum(each.bytes for each in kept)
            yield f"    captured {counted(tensors, 'tensor')}, {size(count)}"
        if of_hook := context.sink.bytes[planned.spec.name]:
            yield f"    counted {size(of_hook)}"
