"""`replace`: a constant instead of the tensor; its values are tested with those of `scale`."""

from __future__ import annotations

import torch
from fake_site import build

from hookrun.engine.actions.replace import Replace


def test_a_write_to_the_new_tensor_does_not_change_the_constant() -> None:
    value = torch.ones(2, 3)
    replace = build(Replace(value={"file": "f.safetensors"}), values={"value": value})
    replace(torch.zeros(2, 3)).mul_(7)
    assert torch.equal(replace(torch.zeros(2, 3)), torch.ones(2, 3))


def test_the_memory_layout_is_kept() -> None:
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    for value in (0, [1, 2, 3, 4]):
        assert build(Replace(value=value))(x).is_contiguous(memory_format=torch.channels_last)
