"""Conditions by sample: an edit is kept in the rows of a tensor for which `when` holds; observers and own functions see
those rows only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookrun.actions.base import Edit
from hookrun.actions.stats import measuring
from hookrun.runtime.site import HookSite
from hookrun.runtime.snapshot import copied
from hookrun.spec.when import ValueCondition
from hookrun.values.containers import readable, tensors
from hookrun.values.tensors import require_whole


def edit_of_samples(site: HookSite, condition: ValueCondition, edit: Edit) -> Edit:
    """The edit, computed for the whole tensor and kept where the condition holds; all other rows stay as they are.

    A user's own function gets the rows for which the condition holds: it may record what it sees, and the gradients of
    its parameters would be NaN where a row that does not count has an infinite derivative.
    """
    holds = _holding(site, condition)

    def edit_rows(x: Tensor) -> Any:
        mask = holds(x).reshape(-1, *[1] * (x.dim() - 1))
        # The other rows are detached: a gradient of 0 times an infinite derivative would be NaN.
        new = edit(torch.where(mask, x, x.detach()) if x.requires_grad else x)
        return None if new is None else torch.where(mask, new, x)

    def edit_chosen(x: Tensor) -> Any:
        rows = _rows(site, holds(x))
        if rows is None:
            raise ValueError("`when.value`: which rows these are is not known while the model is traced")
        if not len(rows):
            return site.untouched(x)
        places = rows.to(x.device)
        new = edit(x[places])
        return None if new is None else x.index_put((places,), new)

    return edit_chosen if site.spec.action.own_functions() else edit_rows


def observer_of_samples(site: HookSite, condition: ValueCondition, observe: Edit) -> Edit:
    """The observer, given only the rows for which the condition holds; it is not called if there are none."""
    holds, current = _holding(site, condition), site.current

    def observe_rows(value: Any) -> Any:
        seen = list(tensors(value))
        if len(seen) > 1:
            raise ValueError("`when.value`: the value holds several tensors: name one with `target`")
        rows = current.holding = _rows(site, holds(seen[0])) if seen else None
        if rows is None or not len(rows):
            site.found_nothing()
            return None
        return observe(copied(value, lambda tensor: tensor.detach()[rows.to(tensor.device)]))

    return observe_rows


def _rows(site: HookSite, mask: Tensor) -> Tensor | None:
    """[k] int64 on the CPU, the rows where the mask is set; in a trial run all; None while the model is traced."""
    if not site.sink.has_values:
        return torch.arange(len(mask), device="cpu")
    known = readable(mask)
    if known is not None and known.shape != mask.shape:
        raise ValueError(
            "`when.value`: torch.vmap maps over the rows, and this action cannot choose among them"
        )
    return None if known is None else known.nonzero().squeeze(1).cpu()


def _holding(site: HookSite, condition: ValueCondition) -> Callable[[Tensor], Tensor]:
    """A function from what the action sees [rows, ...] to whether the condition holds for each row, [rows] bool."""
    measure, clock = measuring((condition.of,)), site.clock
    are_samples = site.spec.keys.tokens is None and site.sink.has_values

    def holds(x: Tensor) -> Tensor:
        samples = clock.samples if are_samples and not torch.compiler.is_dynamo_compiling() else None
        if not x.dim() or (samples is not None and len(samples) != len(x)):
            known = "" if samples is None else f" of the {len(samples)}"
            raise ValueError(
                f"`when.value` needs a row for each sample{known}, the tensor has shape {list(x.shape)}"
            )
        require_whole(x)
        if not x.numel():
            return torch.zeros(len(x), dtype=torch.bool, device=x.device)
        return condition.holds(torch.vmap(lambda row: measure(row)[condition.of])(x.detach()))

    return holds
