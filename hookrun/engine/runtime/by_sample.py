"""Conditions by sample: an edit is kept in the rows of a tensor for which `when` holds; observers and own functions see
those rows only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.actions.base import Edit
from hookrun.engine.actions.stats import measuring
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.snapshot import copied
from hookrun.engine.values.containers import readable, tensors
from hookrun.engine.values.tensors import on_device, require_whole


def edit_of_samples(site: HookSite, edit: Edit) -> Edit:
    """The edit, computed for the whole tensor and kept where the conditions hold; all other rows stay as they are.

    A user's own function gets the rows for which the conditions hold: it may record what it sees, and the gradients of
    its parameters would be NaN where a row that does not count has an infinite derivative.
    """
    holds = _holding(site)

    def edit_rows(x: Tensor) -> Any:
        mask = on_device(holds(x), x.device).reshape(-1, *[1] * (x.dim() - 1))
        # The other rows are detached: a gradient of 0 times an infinite derivative would be NaN.
        seen = x
        if x.requires_grad:
            seen = torch.where(mask, x, x.detach())
        new = edit(seen)
        if new is None:
            return None
        return torch.where(mask, new, x)

    def edit_chosen(x: Tensor) -> Any:
        rows = _rows(site, holds(x))
        if rows is None:
            raise ValueError("`when` chooses samples, and which ones is not known while the model is traced")
        if not len(rows):
            return site.untouched(x)
        places = on_device(rows, x.device)
        new = edit(x[places])
        if new is None:
            return None
        return x.index_put((places,), new)

    if site.spec.runs_own_functions:
        return edit_chosen
    return edit_rows


def observer_of_samples(site: HookSite, observe: Edit) -> Edit:
    """The observer, given only the rows for which the conditions hold; it is not called if there are none.

    Which rows meet a condition on their values is read from the device: the host waits once.
    """
    holds = _holding(site)
    current = site.current

    def observe_rows(value: Any) -> Any:
        seen = list(tensors(value))
        if len(seen) > 1:
            raise ValueError(
                "`when` chooses samples, and the value holds several tensors: name one with `target`"
            )
        rows = current.matching = _rows(site, holds(seen[0])) if seen else None
        if rows is None or not len(rows):
            site.found_nothing()
            return None
        return observe(copied(value, lambda tensor: tensor.detach()[on_device(rows, tensor.device)]))

    return observe_rows


def _rows(site: HookSite, mask: Tensor) -> Tensor | None:
    """[k] int64 on the CPU, the rows where the mask is set; in a trial run all; None while the model is traced."""
    if not site.has_values:
        return torch.arange(len(mask), device="cpu")
    known = readable(mask)
    if known is None:
        return None
    if known.shape != mask.shape:
        raise ValueError(
            "`when` chooses samples: torch.vmap maps over them, and this action cannot choose among them"
        )
    return known.cpu().nonzero().squeeze(1)


def _holding(site: HookSite) -> Callable[[Tensor], Tensor]:
    """A function from what the action sees [rows, ...] to whether the conditions hold for each row, [rows] bool.

    It is on the device of the values, or on the CPU if the conditions are about the data only, which are known there.
    """
    when = site.spec.keys.when
    clock = site.clock
    has_values = site.has_values
    condition = when.value
    reads_data = when.data is not None and has_values
    measure = measuring(() if condition is None else (condition.of,))
    are_samples = site.spec.keys.tokens is None and has_values

    def holds(x: Tensor) -> Tensor:
        samples = clock.samples if are_samples and not torch.compiler.is_dynamo_compiling() else None
        if not x.dim() or (samples is not None and len(samples) != len(x)):
            known = "" if samples is None else f" of the {len(samples)}"
            raise ValueError(
                f"`when` chooses samples and needs a row for each sample{known}, the tensor has shape {list(x.shape)}"
            )
        require_whole(x)
        if condition is None and reads_data:
            return _of_data(site)
        mask = torch.full((len(x),), condition is None, device=x.device)
        if condition is not None and x.numel():
            mask = condition.holds(torch.vmap(lambda row: measure(row)[condition.of])(x.detach()))
        return mask & on_device(_of_data(site), x.device) if reads_data else mask

    return holds


def _of_data(site: HookSite) -> Tensor:
    """[rows] bool on the CPU: for each row that the action sees, whether its sample meets `when.data`."""
    matching = site.clock.matching[site.hook_name]
    chosen = site.current.chosen
    if chosen is not None:
        matching = matching[chosen.rows.samples]
    if not matching.any():
        site.found_nothing()
    return matching
