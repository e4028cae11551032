"""Weights from a file: distinguished from a name, read as tensors only, checked against the model, then loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from hookrun.errors import Problem, SpecError
from hookrun.models import applied_hooks, load_weights
from hookrun.models.settings import Model
from hookrun.models.weights import SUFFIXES, is_path, require_weights

# --- a path or a name


@given(st.text(st.characters(exclude_characters="/" + os.sep)).filter(lambda s: not s.endswith(SUFFIXES)))
def test_a_word_without_separator_is_a_name(text: str) -> None:
    assert not is_path(text)
    assert is_path(f"./{text}")
    for suffix in SUFFIXES:
        assert is_path(text + suffix)
    assert not is_path("ResNet18_Weights.IMAGENET1K_V1")


# --- what is loaded


EXTRA = {"0.b": torch.arange(2), "module.extra": torch.ones(1)}


@pytest.mark.parametrize(
    ("file", "written", "left"),
    [
        *((f"w{suffix}", dict, {}) for suffix in SUFFIXES),
        # a training script's checkpoint
        ("w.pt", lambda state: {"state_dict": state, "epoch": 3}, {}),
        ("w.pt", lambda state: {"model": state, "args": None}, {}),
        # of a data-parallel wrapper
        ("w.pth", lambda state: {f"module.{name}": tensor for name, tensor in state.items()}, {}),
        ("w.pt", lambda state: {**state, **EXTRA}, EXTRA),
    ],
)
def test_loading_returns_what_is_left_of_a_state_dict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, written: Any, left: dict[str, Tensor]
) -> None:
    source = net()
    model = net()
    saved(tmp_path / file, written(source.state_dict()))
    monkeypatch.chdir(tmp_path)  # where a relative path starts
    assert equal(load_weights(model, file), left)
    assert equal(model.state_dict(), source.state_dict())


def test_a_tied_tensor_may_be_stored_under_one_of_its_names(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    source, model = tied(), tied()
    load_weights(model, str(saved(tmp_path / "w.pt", {"1.weight": source.state_dict()["1.weight"]})))
    assert equal(model.state_dict(), source.state_dict())


def test_a_lazy_module_takes_the_shape_of_the_file(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(5, 3))
    model = nn.Sequential(nn.LazyLinear(3))
    load_weights(model, str(saved(tmp_path / "w.pt", source.state_dict())))
    assert equal(model.state_dict(), source.state_dict())


# --- what is refused


def test_missing_tensors_are_listed_with_the_nearest_names(tmp_path: Path) -> None:
    state = net().state_dict()
    state["0.weights"] = state.pop("0.weight")
    [problem] = problems(net(), saved(tmp_path / "w.pt", state))
    assert problem.where == "model.weights"
    assert (
        f"{tmp_path / 'w.pt'} lacks 1 of 7 tensors of the model: '0.weight' (is it '0.weights'?)"
        in problem.what
    )
    assert "'0.weights'" in problem.hint
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8)))
    [problem] = problems(many, saved(tmp_path / "w.pt", {}))
    assert "lacks 16 of 16 tensors" in problem.what
    assert problem.what.count("weight'") + problem.what.count("bias'") == 10
    assert problem.what.endswith("and 6 more")


def test_mismatched_tensors_leave_the_model_unloaded(tmp_path: Path) -> None:
    [problem] = problems(net(3), saved(tmp_path / "w.pt", net(4).state_dict()))
    assert "has 6 of 7 tensors in another shape" in problem.what
    assert "'0.weight' is [4, 2] in the file and [3, 2] in the model" in problem.what
    model = net(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = net(3).state_dict() | {"0.weight": torch.zeros(4, 2)}
    del state["0.bias"]
    found = problems(model, saved(tmp_path / "w.pt", state))
    assert ["lacks 1 of 7" in found[0].what, "has 1 of 7" in found[1].what] == [True, True]
    assert equal(model.state_dict(), before)


def test_a_missing_file_is_named_with_its_neighbours(tmp_path, monkeypatch) -> None:
    saved(tmp_path / "best.pt", {})
    monkeypatch.chdir(tmp_path)
    [problem] = problems(net(), "bets.pt")
    assert str(tmp_path / "bets.pt") in problem.what
    assert "'best.pt'" in problem.what
    [problem] = problems(net(), "nowhere/best.pt")
    assert f"no folder {tmp_path / 'nowhere'}" in problem.what
    [problem] = problems(net(), tmp_path / "w.npz")
    assert (
        problem.what
        == f"{tmp_path / 'w.npz'} is not a .safetensors, .pt, .pth, .ckpt, .bin or .index.json file"
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", b"no tensors at all"])
def test_a_damaged_file_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    [problem] = problems(net(), path)
    assert str(path) in problem.what


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_file_that_holds_code_is_not_run(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pt", net().state_dict() | {"bomb": Bomb(tmp_path / "exploded")})
    [problem] = problems(net(), path)
    assert "could not be read as tensors alone" in problem.what
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [([1, 2], "holds list"), ({"epoch": 3, "lr": 0.1}, "2 of 2 entries that are not tensors: epoch, lr")],
)
def test_a_file_without_a_state_dict_is_refused(tmp_path: Path, content: object, said: str) -> None:
    [problem] = problems(net(), saved(tmp_path / "w.pt", content))
    assert said in problem.what


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.float8_e4m3fn, torch.complex64, torch.int64, torch.int8, torch.uint8, torch.bool)


def one(dtype: torch.dtype, values: object = (0, 1, 1)) -> nn.Module:
    module = nn.Module()
    module.register_buffer("x", torch.tensor(values).to(dtype))
    return module


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("there", [*FLOATS, *OTHERS], ids=str)
def test_only_numbers_of_the_same_kind_are_converted(tmp_path: Path, there: torch.dtype, suffix: str) -> None:
    integers = OTHERS[2:]
    for stored in (*FLOATS, *OTHERS):
        path = saved(tmp_path / f"w{suffix}", one(stored).state_dict())
        alike = stored == there or any(stored in kind and there in kind for kind in (FLOATS, integers))
        model = one(there, [7, 7, 7])
        if alike:
            load_weights(model, str(path))
            assert equal(model.state_dict(), one(there).state_dict())
        else:
            [problem] = problems(model, path)
            assert "'x' is" in problem.what
            assert "in the file and" in problem.what
            assert equal(model.state_dict(), one(there, [7, 7, 7]).state_dict())


@pytest.mark.parametrize(
    ("stored", "there", "value"),
    [
        (torch.int64, torch.uint8, 300),
        (torch.uint8, torch.int8, 200),
        (torch.int8, torch.uint8, -1),
        (torch.uint8, torch.bool, 2),
    ],
)
def test_an_integer_that_the_model_cannot_hold_is_refused(
    tmp_path: Path, stored: torch.dtype, there: torch.dtype, value: int
) -> None:
    path = saved(tmp_path / "w.pt", one(stored, [value]).state_dict())
    [problem] = problems(one(there, [0]), path)
    assert "has 1 of 1 tensor of another kind" in problem.what


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")
def test_tensors_without_plain_values_are_refused(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    for special in (
        weight.to("meta"),
        torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        weight.to_sparse(),
        torch.nested.nested_tensor(list(weight)),
    ):
        [problem] = problems(net(), saved(tmp_path / "w.pt", net().state_dict() | {"0.weight": special}))
        assert "holds 1 of 7 tensors that are quantized, sparse, nested or without values" in problem.what
    [problem] = problems(net(), saved(tmp_path / "w.pt", {0: weight}))
    assert "not tensors: 0" in problem.what


def test_metadata_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(net().state_dict(), path, {"applied": "[" * 100_000 + "]" * 100_000})
    with pytest.raises(SpecError, match="nested too deeply"):
        applied_hooks(str(path))


def net(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def config(path: Path | str) -> Model:
    return Model(name="cnn", weights=str(path))


def saved(path: Path, content: object) -> Path:
    if path.suffix == ".safetensors":
        assert isinstance(content, dict)
        save_file(content, path)
    elif path.name.endswith(".index.json"):
        assert isinstance(content, dict)
        files = {name: f"part-{number % 2}.bin" for number, name in enumerate(content)}
        for file in set(files.values()):
            saved(path.with_name(file), {name: content[name] for name in files if files[name] == file})
        path.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    else:
        torch.save(content, path)
    return path


def problems(model: nn.Module, path: Path | str) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        require_weights(config(path), published=False)
        load_weights(model, str(path))
    return caught.value.errors


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
