"""lottery and quantize_map: what is left of a trained network with fewer weights, or with fewer bits, in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_files import weights

import hookrun


def test_a_fifth_of_the_weights_trains_nearly_as_well_if_it_is_chosen_well(shipped) -> None:
    first = (
        "{select: [conv1.weight, conv2.weight, fc.weight], hook: weight, action: capture, when: {step: 0}}"
    )
    ticket = shipped("lottery", f"+hooks.first={first}")
    (checkpoints,) = Path("outputs/needs").glob("*/*/checkpoints")
    dense = hookrun.open_run(checkpoints.parent)
    chosen_at_random = shipped(
        "lottery", "+hooks.ticket.method=random_unstructured", "~hooks.ticket.importance_scores"
    )
    accuracy = [each.metrics[-1]["accuracy"] for each in (dense, ticket, chosen_at_random)]
    assert accuracy[0] > 0.97 and accuracy[1] > 0.95 and accuracy[1] > accuracy[2] + 0.02
    trained, of_ticket = weights(dense), weights(ticket)
    initial, _ = hookrun.build(experiment="lottery_dense", overrides=["compute.device=cpu"])
    for name in ("conv1.weight", "conv2.weight", "fc.weight"):
        smallest = trained[name].abs().flatten().argsort()[: round(0.8 * trained[name].numel())]
        pruned = of_ticket[name].flatten() == 0
        assert set(pruned.nonzero().flatten().tolist()) == set(smallest.tolist())
        begins = ticket.captures["first"][name][0]
        assert begins.equal(initial.get_parameter(name) * (begins != 0)), "of the dense network"


def test_eight_bits_lose_nothing_and_two_bits_need_a_scale_for_each_channel(shipped) -> None:
    found = shipped("quantize_map").effects
    by_channel = shipped("quantize_map", "hooks.round.per=channel").effects
    assert found.axes == {"module": ["conv1.weight", "conv2.weight", "fc.weight"], "bits": [2, 3, 4, 6, 8]}
    unedited = float(found["unedited"])
    assert unedited == pytest.approx(0.91, abs=0.03)
    assert (found["exact"][:, -1] - unedited).abs().max() < 0.01
    assert found["exact"][1, 0] < unedited - 0.1 < by_channel["exact"][1, 0] - 0.03
