"""A model's own methods are not called by name, and each call of a module has a frame of its own."""

from __future__ import annotations

from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.runtime.frames import call_frame, finished, frames_of


class OwnMethods(nn.Module):
    """Its methods have the names of torch's and mean something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def apply(self, rule: str, times: int) -> str:  # type: ignore[override]
        return rule * times

    def children(self) -> list[str]:  # type: ignore[override]
        return []

    def parameters(self) -> str:  # type: ignore[override]
        return "none"

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(x)
        return output


@pytest.mark.parametrize("prefix", ["", "0."])
def test_a_model_s_own_methods_named_apply_or_children_are_not_called(prefix: str) -> None:
    model = nn.Sequential(OwnMethods()) if prefix else OwnMethods()
    spec = {
        "zero": {"select": f"{prefix}fc", "hook": "apply", "action": "fill", "value": 0},
        "one": {"select": f"{prefix}fc", "hook": "forward", "action": "add_bias", "value": 1},
    }
    plan = hookrun.compile(spec, model, example=((torch.ones(3, 2),), {}))
    assert plan.unchecked is None
    with plan.install(model):
        assert torch.equal(model(torch.ones(3, 2)), torch.ones(3, 2))


class Nested(nn.Module):
    """Calls itself `depth` times."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = list[FrameType]()
        self.seen = list[int]()
        self.ended = list[bool]()

    def forward(self, depth: int) -> None:
        self.frames.append(call_frame())
        self.seen.append(sum(1 for _ in frames_of(self)))
        if depth:
            self(depth - 1)
        self.ended.append(finished(self.frames[0]))
        if not depth:
            raise KeyboardInterrupt


def test_each_call_of_a_module_within_itself_has_a_frame_until_it_ends() -> None:
    module = Nested()
    with pytest.raises(KeyboardInterrupt):
        module(2)
    assert module.seen == [1, 2, 3] and len({*map(id, module.frames)}) == 3
    assert module.ended == [False] and all(finished(frame) for frame in module.frames)
    assert not list(frames_of(module)) and not list(frames_of(nn.Identity()))


def test_outside_of_a_call_it_is_the_caller_s_frame() -> None:
    assert call_frame().f_code.co_name == "test_outside_of_a_call_it_is_the_caller_s_frame"
