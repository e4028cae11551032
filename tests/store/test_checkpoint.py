"""A checkpoint holds every key of the state dict, shared tensors once, and replaces the last one only when complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from hookrun.store.files import StoreError
from hookrun.store.states import checkpoint


class Tied(nn.Module):
    """Two names for one weight, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Odd(nn.Module):
    """Buffers of every kind: scalars, transposed, overlapping, empty, low precision."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(6.0)
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("transposed", base.reshape(2, 3).t())
        self.register_buffer("first", base[:4])
        self.register_buffer("last", base[2:])
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("also_empty", torch.empty(0, 3))
        self.register_buffer("low", torch.randn(3).bfloat16())


NAMED = nn.ModuleDict()
for name in ("a/b", "line\nbreak", "nul\0", "x" * 300):
    NAMED.add_module(name, nn.Linear(1, 1))


@pytest.mark.parametrize("model", [nn.BatchNorm2d(3), Tied(), Odd(), NAMED])
def test_every_key_is_read_back_equal(tmp_path: Path, model: nn.Module) -> None:
    path = tmp_path / "checkpoints" / "last.safetensors"
    checkpoint.save(model, path)
    found, expected = checkpoint.read(path), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    model.load_state_dict(found)


def test_shared_tensors_are_stored_once_and_shared_again(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    checkpoint.save(Tied(), path)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["embed.weight"]
    found = checkpoint.read(path)
    assert found["head.weight"] is found["embed.weight"]


def test_saving_does_not_change_the_model(tmp_path: Path) -> None:
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoint.save(model, tmp_path / "last.safetensors")
    checkpoint.read(tmp_path / "last.safetensors")["first"].fill_(-1)  # what was read is a copy
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert checkpoint.read(tmp_path / "last.safetensors")["first"].tolist() == [0, 1, 2, 3]


def test_a_state_that_is_not_a_tensor_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 1}

    path = tmp_path / "last.safetensors"
    with pytest.raises(
        StoreError, match=r"cannot save '_extra_state' of the model in .*: it is a dict, not a tensor"
    ):
        checkpoint.save(Extra(1, 1), path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_broken_checkpoint_is_named_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "best.safetensors"
    with pytest.raises(StoreError, match=f"there is no checkpoint {path}"):
        checkpoint.read("best.safetensors")
    path.write_bytes(b"\0" * 100)
    with pytest.raises(StoreError, match=f"{path} is not a whole safetensors file"):
        checkpoint.read(path)
