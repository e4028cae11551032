"""An output that anything else refers to is never reported as free to overwrite."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookrun.runtime.sole_reference import SoleReference

pytestmark = pytest.mark.before_compilers
SIZE = 4


class Kept(nn.Module):
    """Returns a new tensor, and keeps what `holds` selects."""

    def __init__(self, holds: str) -> None:
        super().__init__()
        self.holds, self.held = holds, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        new = x + 1
        if self.holds == "itself":
            self.held.append(new)
        elif self.holds == "a view":
            self.held.append(new[:2])
        elif self.holds == "its graph":
            new.requires_grad_()
        return new


def test_an_output_is_free_where_only_its_call_refers_to_it() -> None:
    found = list[bool]()

    def register(module: nn.Module) -> object:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            caller = sys._getframe(1).f_code
            found.append(sole.overwritable(output, sys.getrefcount(output), caller))

        return module.register_forward_hook(hook)

    sole = SoleReference(register, SIZE)
    answers = dict[str, bool]()
    for holds in ("nothing", "itself", "a view", "its graph"):
        module = Kept(holds)
        register(module)
        found.clear()
        module(torch.zeros(SIZE))
        answers[holds] = found[-1]
    assert answers == {"nothing": True, "itself": False, "a view": False, "its graph": False}
