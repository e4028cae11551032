"""MNIST and CIFAR: read from torchvision's folders, unpickled only if they are the published files."""

from __future__ import annotations

import pickle
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torchvision import datasets

from hookrun.data import Split, describe, load
from hookrun.data.info import SPLITS
from hookrun.data.settings import Data
from hookrun.errors import Problem, SpecError

MNIST_LIKE = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
CIFAR_LIKE = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
WriteIdx = Callable[[Path, np.ndarray], None]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """No network; the list gets the time limit that each attempt would have had."""
    limits: list[float | None] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        limits.append(socket.getdefaulttimeout())
        raise URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    return limits


@pytest.mark.parametrize("name", MNIST_LIKE)
@pytest.mark.parametrize(("split", "count"), [("train", 6), ("val", 4)])
def test_mnist_is_described_as_it_is_loaded(mnist_root: Path, name: str, split: Split, count: int) -> None:
    config = section(name, mnist_root)
    info = describe(config, split)
    assert info.shape == (1, 28, 28)
    assert info.dtype == torch.float32
    assert info.num_classes == 10
    assert info.sizes == {"train": 6, "val": 4}
    samples = pickle.loads(pickle.dumps(load(config, split, seed=0)))  # as for worker processes
    assert len(samples) == count
    for i in range(count):
        value, target = samples[i]
        assert torch.equal(torch.as_tensor(value), torch.full((1, 28, 28), i / 255))
        assert target.dtype == torch.int64
        assert int(target) == i


@pytest.mark.parametrize("name", CIFAR_LIKE)
@pytest.mark.parametrize(("split", "part"), [("train", "train_list"), ("val", "test_list")])
def test_cifar_is_as_published_with_channels_first(cifar_root, name: str, split: Split, part: str) -> None:
    config = section(name, cifar_root)
    samples = load(config, split, seed=0)
    assert len(samples) == 2 * len(getattr(CIFAR_LIKE[name], part))
    info = describe(config, split)
    assert info.num_classes == int(name[5:])
    assert info.sizes == {"train": 50_000, "val": 10_000}
    red = torch.stack([torch.ones(32, 32), torch.zeros(32, 32), torch.zeros(32, 32)])
    value, target = samples[1]
    assert torch.equal(torch.as_tensor(value), red)
    assert info.shape == red.shape
    assert info.dtype == red.dtype
    assert target.dtype == torch.int64
    assert int(target) == 1


@pytest.mark.parametrize("name", [*MNIST_LIKE, *CIFAR_LIKE])
def test_missing_files_are_named_with_how_to_get_them(tmp_path, name: str) -> None:
    config = section(name, tmp_path)
    found = problem(lambda: describe(config))
    assert found == problem(lambda: load(config, "val", seed=0))
    assert found.where == "data.root"
    folder = f"{MNIST_LIKE[name]}/raw" if name in MNIST_LIKE else CIFAR_LIKE[name].base_folder
    assert str(tmp_path / folder) in found.what
    cls = MNIST_LIKE.get(name) or CIFAR_LIKE[name].__name__
    assert f"from torchvision.datasets import {cls}; {cls}('DIR', download=True)" in found.hint
    assert "data.args.download=true" in found.hint


@pytest.mark.parametrize("download", [False, True])
def test_without_a_root_the_error_says_how_to_give_one(download: bool) -> None:
    found = problem(lambda: describe(Data(name="mnist", args={"download": download})))
    assert found.where == "data.root"
    assert found.what == "the data set 'mnist' is read from a folder, and none is given"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("train-images-idx3-ubyte", lambda data: data[:-1]),
        ("train-labels-idx1-ubyte", lambda data: data + b"0"),
        ("train-images-idx3-ubyte", lambda data: data[:10]),
        ("train-images-idx3-ubyte", lambda data: data[:3] + b"\x01" + data[4:]),
        ("t10k-images-idx3-ubyte", lambda data: b"<html>" + data),
        ("t10k-labels-idx1-ubyte", lambda data: b""),
    ],
)
@pytest.mark.parametrize(
    "use", [describe, lambda config: [load(config, s, seed=0) for s in SPLITS]], ids=["describe", "load"]
)
def test_a_damaged_file_of_mnist_is_named(
    mnist_root: Path, file: str, change: Callable[[bytes], bytes], use: Callable[[Data], object]
) -> None:
    path = mnist_root / "MNIST/raw" / file
    path.write_bytes(change(path.read_bytes()))
    found = problem(lambda: use(section("mnist", mnist_root)))
    assert found.where == "data.root"
    assert found.what.startswith(f"{path}: torchvision cannot read it as IDX (")
    assert found.hint.startswith("replace the data: on a machine with a network run python -c")


@pytest.mark.parametrize(
    ("file", "array", "said"),
    [
        ("train-labels-idx1-ubyte", np.zeros(5), "6 images and 5 labels"),
        ("t10k-images-idx3-ubyte", np.zeros((4, 8, 9)), "[1, 28, 28] for training and of [1, 8, 9]"),
        ("t10k-labels-idx1-ubyte", None, "the data set 'mnist' lacks t10k-labels-idx1-ubyte in "),
    ],
)
def test_files_of_mnist_that_do_not_fit_each_other_are_refused(
    mnist_root: Path, idx: WriteIdx, file: str, array: np.ndarray | None, said: str
) -> None:
    path = mnist_root / "MNIST/raw" / file
    path.unlink()
    if array is not None:
        idx(path, array)
    assert said in problem(lambda: describe(section("mnist", mnist_root))).what


class Explosive:
    """A pickle that would leave a file behind if it were loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_pickle_that_is_not_the_published_one_is_never_loaded(cifar_root: Path, file: str) -> None:
    trace = cifar_root / "loaded"
    data = pickle.dumps(Explosive(trace))
    (cifar_root / "cifar-10-batches-py" / file).write_bytes(data)
    for split in ("train", "val"):
        found = problem(lambda: load(section("cifar10", cifar_root), split, seed=0))  # type: ignore[arg-type]  # noqa: B023
        assert found.where == "data.root"
        assert "not the published files of 'cifar10'" in found.what
        assert found.what.endswith(f": {file}")
    assert not trace.exists()
    pickle.loads(data)
    assert trace.exists(), "the pickle would have done it"


@pytest.mark.parametrize("name", [*MNIST_LIKE, *CIFAR_LIKE])
def test_a_download_can_be_described_without_a_network(tmp_path, name: str, offline) -> None:
    info = describe(section(name, tmp_path, download=True))
    assert sum(size or 0 for size in info.sizes.values()) == (70_000 if name in MNIST_LIKE else 60_000)
    assert info.shape == ((1, 28, 28) if name in MNIST_LIKE else (3, 32, 32))
    assert offline == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*MNIST_LIKE, *CIFAR_LIKE])
def test_a_failed_download_says_how_to_do_without(tmp_path, name: str, offline) -> None:
    found = problem(lambda: load(section(name, tmp_path, download=True), "train", seed=0))
    assert found.where == "data.args.download"
    assert str(tmp_path) in found.what
    assert "Name or service not known" in found.what
    assert found.hint.startswith("on a machine with a network run python -c")
    assert offline
    assert None not in offline, "a silent network ends the attempt"
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_existing_files_are_not_downloaded_again(name: str, mnist_root, cifar_root, offline) -> None:
    assert len(load(section(name, mnist_root, download=True), "train", seed=0)) in (6, 10)
    assert offline == []


def section(name: str, root: Path, download: bool = False) -> Data:
    return Data(name=name, root=str(root), args={"download": download})


def problem(use: Callable[[], object]) -> Problem:
    with pytest.raises(SpecError) as caught:
        use()
    (found,) = caught.value.errors
    return found
