"""`capture` hands every value over as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hookrun.actions.capture import Capture


def test_a_value_is_kept_whole(site_of: Callable[..., Any]) -> None:
    site = site_of(Capture())
    keep = Capture().build(site)
    value = {"logits": torch.ones(2), "hidden": (torch.zeros(1), None)}
    keep(value)
    keep(None)
    assert site.kept == [value, None]


def test_it_sees_the_value_and_changes_nothing() -> None:
    assert Capture.observes
    assert Capture.scope == "value"
    assert "apply" not in Capture.hooks
