"""A hook's random numbers depend only on its seed and on the number of the draw."""

from __future__ import annotations

import torch
from torch import nn

from hookrun.runtime.clock import Calls, Clock
from hookrun.runtime.rng import Draws, derived_seed

CPU = torch.device("cpu")


def drawn(draws: Draws) -> list[float]:
    return torch.rand(3, generator=draws.generator(CPU)).tolist()


def test_a_seed_depends_on_each_part_and_is_the_same_in_every_process() -> None:
    assert derived_seed(0, "noise", "fc") == 7548869590823487893
    assert len({derived_seed(*parts) for parts in ((1, 12), (11, 2), (112,), ("1", 12))}) == 4


def test_draws_continue_from_a_saved_state_without_the_global_generator() -> None:
    draws, before = Draws(5), torch.get_rng_state()
    first, chance = drawn(draws), draws.chance(1)
    state = draws.state_dict()
    second, then = drawn(draws), draws.chance(1)
    again = Draws(5)
    again.load_state_dict(state)
    assert (drawn(again), again.chance(1)) == (second, then)
    assert first != second and chance != then and 0 <= chance < 1
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_of_a_call_are_numbered_within_it() -> None:
    """Draws of earlier calls do not affect a call."""
    found = list[list[float]]()
    for in_first in (1, 3):
        calls, module = Calls(Clock(nn.Identity())), nn.Identity()
        draws = Draws(5)
        draws.calls = calls
        calls.count(module)
        of_first = [drawn(draws) for _ in range(in_first)]
        calls.count(module)
        found.append(drawn(draws))
        assert found[-1] not in of_first and len({*map(tuple, of_first)}) == in_first
    assert found[0] == found[1]
