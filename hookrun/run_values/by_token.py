"""Captures of tokens: several rows for each sample."""

from __future__ import annotations

from hookrun.store.captures import StoredCapture

BY_TOKEN = (
    "it has a row for each token: capture one position of each sample, such as tokens: -1, or the whole value, from "
    "which `at: same` takes the tokens"
)
"""The hint for a capture with several rows for each sample, where one is needed."""


def is_by_token(capture: StoredCapture) -> bool:
    """Whether it was captured with `tokens`, so that its rows are of tokens."""
    return bool((capture.positions >= 0).any())
