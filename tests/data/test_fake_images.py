"""Generated images: item i is always the same item, whichever items were read before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from hookrun.data import Split, describe, load
from hookrun.data.settings import Data
from hookrun.errors import SpecError


def section(**args: Any) -> Data:
    return Data(name="fake_images", args=args)


def image(config: Data, index: int, split: Split = "train", seed: int = 0) -> list[Any]:
    value, target = load(config, split, seed=seed)[index]
    assert isinstance(value, torch.Tensor)
    return [value.tolist(), int(target)]


SMALL = section(shape=[1, 2, 2], train_size=20, val_size=10)


def test_the_description_fits_the_loaded_samples() -> None:
    info = describe(section(shape=[1, 4, 6], train_size=5, val_size=3, num_classes=4), "val")
    assert info.shape == (1, 4, 6)
    assert info.dtype == torch.float32
    assert info.num_classes == 4
    assert info.sizes == {"train": 5, "val": 3}
    samples = load(section(shape=[1, 4, 6], train_size=5, val_size=3, num_classes=4), "val", seed=0)
    inputs, targets = default_collate(list(samples))  # type: ignore[call-overload]
    assert inputs.shape == (3, 1, 4, 6)
    assert inputs.dtype == torch.float32
    assert targets.shape == (3,)
    assert targets.dtype == torch.int64
    assert 0 <= float(inputs.min()) <= float(inputs.max()) <= 1
    assert 0 <= targets.min() <= targets.max() < 4


@given(st.permutations(range(8)))
def test_items_do_not_depend_on_the_order_of_reading(order: list[int]) -> None:
    samples = load(SMALL, "train", seed=0)
    found = {i: torch.as_tensor(samples[i][0]).tolist() for i in order}
    assert found == {i: image(SMALL, i - 20)[0] for i in range(8)}  # of 20: a list's negative indexes


def test_items_leave_torch_s_own_randomness_alone() -> None:
    before = torch.get_rng_state()
    first = image(SMALL, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert image(SMALL, 3) == first
    torch.set_rng_state(before)


def test_a_seed_of_null_takes_the_experiment_s_seed() -> None:
    seen = {str(image(SMALL, i, split)[0]) for i in range(10) for split in ("train", "val")}
    assert len(seen) == 20
    assert image(SMALL, 0, seed=0) == image(SMALL, 0, seed=1)
    own = section(shape=[1, 2, 2], seed=None)
    assert image(own, 0, seed=0) != image(own, 0, seed=1)
    assert image(own, 0, seed=0) == image(SMALL, 0)
    assert image(section(shape=[1, 2, 2], seed=1), 0) == image(own, 0, seed=1)


def test_an_empty_split_is_an_error_where_it_is_used() -> None:
    assert describe(section(val_size=0), "train").sizes["val"] == 0
    with pytest.raises(SpecError, match=r"data\.args\.val_size"):
        describe(section(val_size=0), "val")
    with pytest.raises(SpecError, match=r"data\.args\.val_size"):
        load(section(val_size=0), "val", seed=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("shape", [3, 8]), ("shape.1", [3, 0, 8]), ("num_classes", 0), ("train_size", -1), ("seed", -1)],
)
def test_impossible_images_are_refused(key: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        describe(section(**{key.split(".")[0]: value}))
    assert [problem.where for problem in caught.value.errors] == [f"data.args.{key}"]
