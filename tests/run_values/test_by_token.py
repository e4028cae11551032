"""Captures that have a row for each token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch

from hookrun.run_values.by_token import is_by_token
from hookrun.store.captures import StoredCapture


def test_a_row_with_a_position_belongs_to_a_token() -> None:
    found = [
        is_by_token(cast(StoredCapture, SimpleNamespace(positions=torch.tensor(positions))))
        for positions in ([-1, -1], [-1, 0], [2, 3])
    ]
    assert found == [False, True, True]
