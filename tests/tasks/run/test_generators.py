"""Draws in a seeded block depend on its seed only and do not affect later draws; saved states continue."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hookrun.tasks.run.generators import all_seeded, generator_states, seeded, set_generators


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_generators_continue_from_a_saved_state() -> None:
    states = generator_states()
    first = draws()
    assert draws() != first
    set_generators(states)
    assert draws() == first


def test_seeded_blocks_repeat_and_restore_the_generators() -> None:
    states = generator_states()
    outside = draws()
    set_generators(states)
    with all_seeded(2**32 + 7):  # more than NumPy accepts
        first = draws()
    with pytest.raises(ZeroDivisionError), all_seeded(2**32 + 7):
        assert draws() == first
        raise ZeroDivisionError
    with seeded(2**32 + 7):
        assert float(torch.rand(())) == first[0]
    assert draws() == outside
