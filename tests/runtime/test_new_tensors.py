"""Modules of torch's own classes that allocate their output are recognised, and no others."""

from __future__ import annotations

from torch import nn

from hookrun.runtime.new_tensors import maker


def test_modules_that_allocate_their_output_are_recognised() -> None:
    class Own(nn.Linear):
        """A subclass may return anything."""

    assert maker(nn.Linear(2, 2)) is nn.Linear.forward
    assert maker(nn.ReLU()) is nn.ReLU.forward
    for other in (nn.ReLU(inplace=True), Own(2, 2), nn.Identity(), nn.Flatten()):
        assert maker(other) is None, other
