"""A forward of the small decoder as the lens observes it, under hooks or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from decoders import made, scrambled
from torch import Tensor, nn

import hookrun
from hookrun.studies.lens.contributions import ObservedForward, Observer, Source, find_sources
from hookrun.studies.lens.places import Places, find_places

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
ROWS = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 3])
"""The three positions that are read: (sequence, column)."""


def decoder(**args: Any) -> nn.Module:
    """Two blocks of width 8 with two heads; every parameter is drawn anew."""
    return scrambled(made(**{"width": 8, "heads": 2, "layers": 2, **args}))


def places_of(model: nn.Module, **given: Any) -> Places:
    """The places of a usual decoder, but for those that are given."""
    places = find_places(model, residual=None, final_norm=None, unembed=None, heads=None, by_head=True)
    return replace(places, **given)


@torch.no_grad()
def observed(
    model: nn.Module, places: Places | None = None, *, inside: bool = True, **hooks: Any
) -> tuple[ObservedForward, Tensor]:
    """What was observed of one forward, and the model's output after the hooks."""
    observer = Observer(model, places or places_of(model), inside=inside)
    with hookrun.hooked(model, hooks), observer.installation:
        output, seen = observer.observe(lambda: model(IDS), ROWS, (2, 4))
        return seen, output


@torch.no_grad()
def sources_of(model: nn.Module, places: Places) -> list[Source]:
    """What adds to the stream."""
    seen, _ = observed(model, places)
    return find_sources(model, places, seen, Observer(model, places, inside=True).embeddings)


def edit(select: str, hook: str = "forward", action: str = "scale", **keys: Any) -> dict[str, Any]:
    """A hook that doubles a value, but for what is given."""
    given = {"factor": 2} if action == "scale" else {}
    return {"select": select, "hook": hook, "action": action, **given, **keys}
