"""The calls of a model are passes over tokens: each starts a new sequence unless it continues with a cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hookrun.runtime.tokens.calls import CallTokens, Pass
from hookrun.runtime.tokens.sequences import Sequences

IDS = torch.tensor([[5, 6, 7]])


class Model(nn.Module):
    """Records the current pass."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = Sequences(self)
        self.seen = list[Pass | None]()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.seen.append(self.sequences.current)
        return input_ids


def test_a_call_is_a_pass_until_it_ends() -> None:
    model = Model()
    for module, reads in model.sequences.readers():
        module.register_forward_pre_hook(reads, with_kwargs=True)
    model.register_forward_hook(model.sequences.leave)
    model(IDS)
    model(IDS[:, :2])
    first, second = model.seen
    assert first is not None and first.ids is not None and first.ids.tolist() == [[5, 6, 7]]
    assert second is not None and (second.total, second.new_from, second.number) == (2, 0, 1)
    assert model.sequences.current is None


def test_explicit_settings_apply_until_the_next_ones() -> None:
    sequences = Sequences(Model())
    sequences.set_by_hand(CallTokens.of(IDS))
    first = sequences.current
    assert first is not None and (first.total, first.prompt) == (3, 3)
    assert sequences.current is first
