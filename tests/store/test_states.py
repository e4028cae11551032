"""Checkpoints and resumable states: complete or absent, read back equal, and what is damaged is named."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn, optim

from hookrun.run.experiment.optimizers import OPTIMIZERS, SCHEDULERS
from hookrun.store.files import StoreError
from hookrun.store.format import decode, encode
from hookrun.store.states.files import VERSION, newest_state, remove_states, save_weights, write_state
from hookrun.store.states.tree import NotPlain, flatten, unflatten


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
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    save_weights(model, path)
    with safe_open(path, framework="pt") as file:
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    stored = load_file(path)
    found = stored | {name: stored[same] for name, same in aliases.items()}
    for state in (found, model.state_dict()):
        assert state.keys() == expected.keys()
        for name in expected:
            assert torch.equal(state[name], expected[name])
        for name in expected:
            assert state[name].dtype == expected[name].dtype


def test_shared_tensors_are_stored_once_with_their_other_names(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    save_weights(Tied(), path)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["embed.weight"]
        assert json.loads(file.metadata()["aliases"]) == {"head.weight": "embed.weight"}


def test_a_state_that_is_not_a_tensor_is_named(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 1}

    path = tmp_path / "last.safetensors"
    with pytest.raises(
        StoreError, match=r"cannot save '_extra_state' of the model in .*: it is a dict, not a tensor"
    ):
        save_weights(Extra(1, 1), path)
    assert list(tmp_path.iterdir()) == []


def through_json(tree: Any) -> Any:
    values, tensors = flatten(tree)
    return unflatten(decode(encode(values).encode()), lambda name: tensors[name].clone())


def test_types_are_read_back() -> None:
    shared = torch.arange(4)
    tree = {
        "numbers": [None, True, 3, -0.0, 1e-300, math.inf], "nan": math.nan,
        "texts": ["NaN", "tensor", "\\Infinity", "\ud800"], 1: (2, "b", ()), (3, "k"): Counter({5: 2}),
        "generator": random.getstate(), "first": shared, "again": [shared],
        "empty": [torch.empty(0, 3), torch.empty(0)],
    }  # fmt: skip
    found = through_json(tree)

    others = tree.keys() - {"first", "again", "empty", "nan"}
    assert {key: found[key] for key in others} == {key: tree[key] for key in others}
    assert math.isnan(found["nan"])
    assert math.copysign(1, found["numbers"][3]) == -1
    assert type(found[3, "k"]) is Counter
    assert found["first"] is found["again"][0]
    assert found["first"].equal(shared)
    assert [each.shape for each in found["empty"]] == [(0, 3), (0,)]


UNPLAIN = {
    "object": object(),
    "set": {1, 2},
    "function": lambda: 0,
    "device": torch.device("cpu"),
    "sparse": torch.ones(2).to_sparse(),
    "bytes": b"x",
}


@pytest.mark.parametrize("value", UNPLAIN.values())
def test_other_values_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(NotPlain, match=r"^optimizer\.3\.x"):
        flatten({"optimizer": {3: {"x": value}}})


@pytest.mark.parametrize(
    "value", [{"a": 1, "b": 2}, {"code": "x"}, {"items": [[[1], 2]]}, {"keys": 3}, {"items": 3}, {}]
)
def test_invalid_input_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError):
        unflatten(value, {}.__getitem__)


def test_states_of_every_optimizer_are_read_back() -> None:
    """A user's own classes cannot be checked before a run; torch's are checked here."""
    more = {
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [1, 2]},
        "ExponentialLR": {"gamma": 0.5},
    }
    more |= {"OneCycleLR": {"max_lr": 1.0, "total_steps": 9}, "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0}}
    more |= {"CosineAnnealingLR": {"T_max": 5}, "CosineAnnealingWarmRestarts": {"T_0": 5}}
    for name, cls in OPTIMIZERS.items():
        weight = nn.Parameter(torch.ones(2, 2))
        weight.grad = torch.ones(2, 2).to_sparse() if name == "SparseAdam" else torch.ones(2, 2)
        made = cls([weight], lr=0.1)  # type: ignore[call-arg]
        made.step()
        loaded = cls([weight], lr=0.2)  # type: ignore[call-arg]
        loaded.load_state_dict(through_json(made.state_dict()))
        assert str(loaded.state_dict()) == str(made.state_dict()), name
    for name in sorted(set(SCHEDULERS) - {"ChainedScheduler", "SequentialLR"}):
        if name == "SWALR":
            more[name] = {"swa_lr": 0.1}
        optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        step = SCHEDULERS[name](optimizer, **more.get(name, {}))
        assert through_json(step.state_dict()) == step.state_dict(), name


def write(run: Path, value: int, **options: int) -> Path:
    content = flatten({"value": value, "weight": torch.full((300,), value)})
    return write_state(run, f'{{"value": {value}}}', *content, **options)


def newest(run: Path) -> tuple[int | None, list[str]]:
    found, damaged = newest_state(run)
    return (None if found is None else found.tree["value"]), list(damaged.values())


def test_only_the_newest_states_are_kept(tmp_path: Path) -> None:
    for value in range(5):
        write(tmp_path, value)
    states = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    found, damaged = newest_state(tmp_path)

    assert states == ["state_000004", "state_000005"]
    assert found is not None
    assert not damaged
    assert found.about == {"value": 4}
    assert found.tree["weight"].equal(torch.full((300,), 4))


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_damaged_state_leaves_the_one_before(tmp_path: Path, name: str) -> None:
    write(tmp_path, 0)
    file = write(tmp_path, 1) / name
    whole = file.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        value, damaged = newest(tmp_path)
        assert value == 0
        assert "state_000002 is damaged" in damaged[0]
    for content in (whole[:-1], b"", b"{}"):
        file.write_bytes(content)
        assert newest(tmp_path)[0] == 0
    file.unlink()
    assert newest(tmp_path)[0] == 0
    file.symlink_to(tmp_path / "checkpoints" / "state_000001" / name)
    assert newest(tmp_path)[0] == 0


@pytest.mark.parametrize("content", ["[]", '{"version": "2"}', f'{{"version": {VERSION}}}'])
def test_a_state_without_content_is_damaged(tmp_path: Path, content: str) -> None:
    (write(tmp_path, 0) / "state.json").write_text(content)
    value, [said] = newest(tmp_path)
    assert value is None
    assert "state_000001 is damaged: " in said


@pytest.mark.parametrize(("version", "writer"), [(VERSION - 1, "an earlier"), (VERSION + 1, "a later")])
def test_a_state_of_another_version_is_not_called_damaged(tmp_path: Path, version: int, writer: str) -> None:
    (write(tmp_path, 0) / "state.json").write_text(f'{{"version": {version}}}')
    value, [said] = newest(tmp_path)
    assert value is None
    assert "damaged" not in said
    assert f"written by {writer} hookrun, which can resume the run: it is of version {version}, and" in said


def test_a_tensor_that_is_not_in_the_file_is_named_shortly(tmp_path: Path) -> None:
    values, tensors = flatten({"weight": torch.ones(2)})
    values["keys"]["weight"] = {"tensor": "x" * 10_000}
    write_state(tmp_path, "{}", values, tensors)
    _, damaged = newest_state(tmp_path)
    [said] = damaged.values()
    assert "state_000001 is damaged: File does not contain tensor xxx" in said
    assert len(said) < 2_000


def test_other_files_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, 0)
    (tmp_path / "checkpoints" / ".state_000009.1.tmp").mkdir()
    (tmp_path / "checkpoints" / "state_9").mkdir()
    os.symlink("state_000001", tmp_path / "checkpoints" / "state_000008")
    assert newest(tmp_path) == (0, [])


def test_a_state_that_cannot_be_written_leaves_the_earlier_ones(tmp_path, monkeypatch) -> None:
    write(tmp_path, 0)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(
        StoreError, match=r"cannot write .*state_000002: No space left on device; state_000001"
    ):
        write(tmp_path, 1)
    assert os.listdir(tmp_path / "checkpoints") == ["state_000001"]
    assert newest(tmp_path) == (0, [])


def test_removed_with_the_folder_where_nothing_else_is_kept(tmp_path: Path) -> None:
    write(tmp_path, 0)
    remove_states(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    assert newest(tmp_path) == (None, [])
