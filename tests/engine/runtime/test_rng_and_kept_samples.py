"""The random numbers of a hook and the samples that it keeps are the same in every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import hookrun
from hookrun.engine.runtime.clock import RowsOfRank
from hookrun.engine.runtime.rng import derived_seed, drawn


def test_a_seed_depends_on_each_of_its_parts() -> None:
    assert derived_seed(0, "noise", "fc") == 7548869590823487893
    assert len({derived_seed(*parts) for parts in ((1, 12), (11, 2), (112,), ("1", 12))}) == 4


def normal(x: Tensor, generator: Generator) -> Tensor:
    return x.normal_(generator=generator)


def of_rows(like: Tensor, rows: RowsOfRank | None) -> Tensor:
    return drawn(like, normal, Generator().manual_seed(1), rows)


def test_the_numbers_of_all_ranks_are_those_of_one_process() -> None:
    channels_last = torch.empty(5, 3, 2, 2).to(memory_format=torch.channels_last)
    for like in (torch.empty(5, 3), torch.empty(5), channels_last):
        alone = of_rows(like, None)
        shares = [
            of_rows(like[mine.start : mine.stop], RowsOfRank(mine, 5)) for mine in (range(2), range(2, 5))
        ]
        assert torch.equal(torch.cat(shares), alone), like.shape


def test_a_tensor_without_the_batch_s_rows_is_refused() -> None:
    for like in (torch.empty(3, 2), torch.empty(())):
        with pytest.raises(ValueError, match="this rank has 2 rows"):
            of_rows(like, RowsOfRank(range(2), 5))


# These set-ups contain hooks that do nothing; tests/semantics/test_never_fired.py tests the warning.
pytestmark = pytest.mark.filterwarnings("ignore::hookrun.HookrunWarning")

X = torch.arange(40.0).reshape(10, 4)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def spec(keep: dict[str, int], **keys: Any) -> dict[str, Any]:
    return {"h": {"select": "*", "hook": "forward", "action": "capture", "keep": keep, **keys}}


def kept(keep: dict[str, int], population: int = 10, epochs: int = 1, **keys: Any) -> dict[str, list[int]]:
    """The samples kept at each module, in batches of 3, in another order in each epoch."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    rows = torch.arange(float(population)).unsqueeze(1)
    with hookrun.hooked(model, spec(keep, **keys)) as hooks:
        hooks.population = population
        for epoch in range(epochs):
            order = torch.randperm(population, generator=torch.Generator().manual_seed(epoch))
            for batch in order.split(3):
                hooks.samples = batch
                model(rows[batch])
    return {
        path: sorted(torch.cat(found).flatten().int().tolist()) for path, found in hooks.captures["h"].items()
    }


def test_every_third_sample_of_the_data_set_in_any_order() -> None:
    assert kept({"every": 3}) == {"0": [0, 3, 6, 9], "1": [0, 3, 6, 9]}


def test_a_reservoir_is_the_same_at_every_module() -> None:
    found = kept({"reservoir": 4}, epochs=2)
    assert found["0"] == found["1"]
    assert len(set(found["0"])) == 4
    assert len(found["0"]) == 8
    assert kept({"reservoir": 100})["0"] == list(range(10)), "all, if there are fewer"


def test_each_sample_is_as_likely_as_any_other() -> None:
    names = [f"h{n}" for n in range(400)]
    model = nn.Identity()
    hooks_of = {
        name: {"select": "", "hook": "forward", "action": "capture", "keep": {"reservoir": 3}}
        for name in names
    }
    with hookrun.hooked(model, hooks_of) as hooks:
        hooks.population, hooks.samples = 10, torch.arange(10)
        model(torch.arange(10.0).unsqueeze(1))
    chosen = torch.cat([hooks.captures[name][""][0].flatten().long() for name in names])
    counts = torch.bincount(chosen, minlength=10)
    assert counts.sum() == 1200
    assert (counts - 120).abs().max() < 5 * (120 * 0.7) ** 0.5  # five standard deviations


@pytest.mark.parametrize(
    ("samples", "population", "keep", "value", "said"),
    [
        (None, 10, {"every": 2}, X, "does not know which samples these are: set hooks.samples"),
        (range(10), None, {"reservoir": 2}, X, "how many there are: set hooks.population"),
        (range(10), 3, {"reservoir": 2}, X, "does not know sample 9: hooks.population is 3, set it to"),
        (range(9), 10, {"every": 2}, X, r"sees a tensor of shape \[10, 4\] in a batch of 9"),
    ],
    ids=["no samples", "no population", "too small a population", "another batch"],
)
def test_an_impossible_choice_names_hook_with_module(
    samples: Any, population: int | None, keep: dict[str, int], value: torch.Tensor, said: str
) -> None:
    model = net()
    with hookrun.hooked(model, spec(keep)) as hooks:
        hooks.samples, hooks.population = samples, population
        with pytest.raises(hookrun.HookError, match=rf"hook 'h' \(forward, capture\) on 0: .*{said}"):
            model(value)


@pytest.mark.parametrize("hook", ["grad", "post_accumulate_grad", "optimizer_step_pre", "saved_tensors"])
def test_values_that_belong_to_no_sample_are_refused(hook: str) -> None:
    entry = {"select": "0" if hook == "saved_tensors" else "0.weight", "hook": hook}
    with pytest.raises(hookrun.CompileError, match=f"keep chooses samples, and {hook} sees none"):
        hookrun.compile({"h": {**entry, "action": "capture", "keep": {"every": 2}}}, net())


def test_gradients_by_sample_are_chosen_too() -> None:
    model = net()
    with hookrun.hooked(model, spec({"every": 5}, hook="output_grad")) as hooks:
        hooks.samples = range(10)
        model(X).square().sum().backward()
    assert [len(found[0]) for found in hooks.captures["h"].values()] == [2, 2]


@pytest.mark.parametrize(
    "numbers",
    [[[0], [1]], torch.tensor([[0, 1]]), torch.tensor(3), [0.5, 1.0], [True, False], [-1, 0], "ab", ["a"]],
)
def test_samples_must_be_numbers_in_one_dimension(numbers: Any) -> None:
    with hookrun.hooked(net(), {}) as hooks:
        with pytest.raises(hookrun.HookrunError, match=r"samples: found .*, expected \[B\] whole numbers"):
            hooks.samples = numbers
        hooks.samples = []
        assert hooks.samples is not None
        assert hooks.samples.dtype == torch.int64


def test_shapes_are_checked_with_a_choice() -> None:
    plan = hookrun.compile(spec({"reservoir": 2}, reduce={"mean": [1]}), net(), example=((X,), {}))
    assert plan.unchecked is None
