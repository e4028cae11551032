"""The content of model.json and hooks.json: facts about the model and the hooks of a run."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookrun.plan.model_tree import ModelNames
from hookrun.runtime import Installation


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
