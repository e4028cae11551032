"""Only modules of torch's own classes that allocate their output are said to."""

from __future__ import annotations

from torch import nn

from hookrun.runtime.new_tensors import maker


def test_a_module_that_allocates_its_output_has_a_maker_and_others_have_none() -> None:
    class Own(nn.Linear):
        """May return anything."""

    assert maker(nn.Linear(2, 2)) is nn.Linear.forward
    assert maker(nn.ReLU()) is nn.ReLU.forward
    for other in (nn.ReLU(inplace=True), Own(2, 2), nn.Identity(), nn.Flatten()):
        assert maker(other) is None, other
