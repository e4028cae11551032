"""data=python: the samples of a user's own data set are checked and become tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hookrun.data.own import OwnData
from hookrun.engine.trust.callables import code_of_name
from hookrun.engine.trust.load import Trusted
from hookrun.errors import HookrunError, SpecError


def own(target: Callable[..., Any], **args: Any) -> OwnData:
    code = code_of_name(target, "hookrun_test.data:build")
    trusted = Trusted("hookrun_test.data:build", target, code, by_hand=False)
    return OwnData(factory=trusted, args=args)


class Pairs(list[Any]):
    classes = ("a", "b", "c")


def build(split: str, size: int = 2, seed: int = 0) -> Pairs | None:
    if split == "train":
        return None
    drawn = torch.rand(1)  # the global generator is seeded for the factory and restored
    return Pairs(
        ({"x": np.ones((2, 3), dtype=np.float32) * n, "n": seed, "drawn": drawn}, n) for n in range(size)
    )


def test_one_sample_describes_the_data() -> None:
    info = own(build, size=4).inspect(None, "val")
    assert isinstance(info.inputs, dict)
    assert info.inputs["x"].shape == (2, 3)
    assert info.inputs["x"].dtype is torch.float32
    assert info.num_classes == 3
    assert info.sizes == {"train": 0, "val": 4}


def test_own_data_takes_the_seed_of_the_experiment() -> None:
    before = torch.get_rng_state()
    samples = own(build).open(None, "val", seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    inputs, target = samples[1]
    assert isinstance(inputs, dict)
    assert inputs["x"].tolist() == [[1.0] * 3] * 2
    assert int(inputs["n"]) == 5
    assert int(target) == 1
    drawn = [own(build).open(None, "val", seed=seed)[0][0]["drawn"] for seed in (5, 6)]  # type: ignore[index]
    assert torch.equal(drawn[0], inputs["drawn"])
    assert not torch.equal(drawn[1], inputs["drawn"])
    with pytest.raises(IndexError):
        samples[2]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda split: 3, "returned an object of type int for the split 'train'"),
        (lambda split: [], "the split 'val' has no samples"),
        (lambda split: [1], "sample 0 of 'hookrun_test.data:build' is a int"),
        (lambda split: [(object(), 1)], "sample 0 of 'hookrun_test.data:build' holds a object"),
        (lambda split: 1 / 0, "ZeroDivisionError"),
        (lambda split, width: [], "width"),
    ],
)
def test_what_is_not_a_data_set_is_refused(made: Callable[..., Any], said: str) -> None:
    with pytest.raises(SpecError, match=r"data\.(factory|args)") as refusal:
        own(made).inspect(None, "val")
    assert said in str(refusal.value)


def test_a_sample_that_fails_is_named_by_its_number() -> None:
    class Failing(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise KeyError(index)

    with pytest.raises(HookrunError, match=r"sample 1 of .* failed: KeyError"):
        own(lambda split: Failing([0, 1])).open(None, "val", seed=0)[1]
