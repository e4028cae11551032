"""`fold`: what torch computes of everything that a hook has seen, put together in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.engine.values.folded import Folded
from hookrun.engine.values.folding import Folding, SeenRows, Wanted, keys_of

EVERYTHING = ["mean", "cov", {"quantiles": [0.1, 0.5]}, {"top": 3}]
IDENTITY = nn.Sequential(nn.Identity())


def folded(batches: Any, samples: Any = None, labels: Any = None, **keys: Any) -> Folded:
    """The fold of the batches, which a module returns as they are."""
    hook = {"select": "0", "hook": "forward", "action": "fold", "of": EVERYTHING, **keys}
    with hookrun.hooked(IDENTITY, {"h": hook}) as hooks:
        for number, batch in enumerate(batches):
            hooks.samples = None if samples is None else samples[number]
            hooks.labels = None if labels is None else labels[number]
            IDENTITY(batch)
        return hooks.folds["h"]["0"]


def assert_is_of(fold: Folded, x: Tensor, top: int = 3) -> None:
    """What was folded are the channels (dimension 1) of x [N, C, ...]."""
    rows = x.movedim(1, 0).flatten(1)
    assert_close(fold.mean, rows.double().mean(1))
    assert_close(fold.cov, torch.cov(rows.double()))
    rows = rows if x.dtype is torch.float64 else rows.float()
    at = torch.tensor([0.1, 0.5], dtype=rows.dtype)
    assert_close(fold.quantiles, torch.quantile(rows, at, dim=1).T)
    flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
    values, samples = flat.amax(2).topk(top, dim=0)
    assert torch.equal(fold.top.values, values.T)
    assert torch.equal(fold.top.samples, samples.T)
    places = flat.argmax(2)
    assert torch.equal(fold.top.positions, places.gather(0, samples).T)


@pytest.mark.parametrize("shape", [(40, 5), (20, 3, 4, 2), (10, 2, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_it_equals_torch_over_all_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    if dtype is torch.bfloat16:  # without equal values, which topk orders as it likes
        x = torch.randperm(x.numel()).view(shape)[:, :, ...].to(dtype)
        x = x + torch.zeros(shape, dtype=dtype)
    if dtype is not torch.bfloat16 or x.unique().numel() == x.numel():
        assert_is_of(folded(x.split(7)), x)
        assert_is_of(folded([x]), x)
    else:
        assert_close(folded(x.split(7)).mean, x.double().mean([d for d in range(x.dim()) if d != 1]))


def test_a_large_mean_does_not_cancel() -> None:
    x = torch.randn(1000, 3, dtype=torch.float64) + 1e9
    fold = folded(x.split(13))
    assert_close(fold.cov, torch.cov(x.T - 1e9), rtol=1e-6, atol=1e-6)


def test_of_equal_values_the_smaller_sample_is_first() -> None:
    x = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0, 2.0])[:, None]
    ids = torch.tensor([9, 8, 3, 5, 1, 2])
    for order in (range(6), reversed(range(6)), (3, 0, 5, 1, 2, 4)):
        order = list(order)
        fold = folded(x[order].split(2), ids[order].split(2))
        assert fold.top.samples.tolist() == [[2, 3, 5]]


def test_each_sample_has_one_place_at_most() -> None:
    x = torch.tensor([[5.0, 6.0], [1.0, 2.0], [7.0, 0.0]])[:, None, None, :]
    ids = [[0, 1, 2], [0, 1, 2], [2, 1, 0]]
    fold = folded([x, x * 2, x[[2, 1, 0]]], ids, of=[{"top": 4}])
    assert fold.top.samples.tolist() == [[2, 0, 1, -1]]
    assert fold.top.values[0, :3].tolist() == [14.0, 12.0, 4.0]
    assert fold.top.values[0, 3].isnan()
    assert fold.top.positions.tolist() == [[0, 1, 1, -1]]


BATCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda x: x,
    "every row is larger": lambda x: x.sort(0).values,
    "most are equal": lambda x: x.relu().round(),
    "not finite": lambda x: torch.where(x > 2.5, torch.nan, torch.where(x < -1, -torch.inf, x)),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("size", [96, 31])
def test_top_is_that_of_all_rows_sorted(kind: str, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = BATCHES[kind](torch.randn(3000, 7, generator=generator))
    ids = torch.randperm(3000, generator=generator)
    parts = [Folding(Wanted(top=5)) for _ in range(3)]
    for number, rows in enumerate(torch.arange(3000).split(size)):
        rank = number % 2
        parts[rank].add(SeenRows(x[rows, :, None], keys_of(ids[rows], "val")), [7], [])
        if number == 17:  # resumed, while something waits to be sorted
            state = parts[rank].state_dict()
            parts[rank] = Folding(Wanted(top=5))
            parts[rank].load_state_dict(state)
    for part in parts[:2]:
        parts[2].load_state_dict(part.state_dict())
    fold = parts[2].result()
    assert fold is not None
    assert fold.top is not None
    in_order = x[ids.argsort()].sort(dim=0, descending=True, stable=True)
    assert torch.equal(fold.top.samples, in_order.indices[:5].T)
    assert_close(fold.top.values, in_order.values[:5].T, rtol=0, atol=0, equal_nan=True)


def test_elements_are_units_of_their_own() -> None:
    x = torch.randn(30, 2, 3)
    fold = folded(x.split(8), of=["mean", {"quantiles": [0.5]}, {"top": 2}], per="element")
    assert_close(fold.mean, x.double().mean(0))
    assert_close(fold.quantiles[..., 0], x.quantile(0.5, dim=0))
    values, samples = x.topk(2, dim=0)
    assert torch.equal(fold.top.values, values.movedim(0, -1))
    assert torch.equal(fold.top.samples, samples.movedim(0, -1))


def test_labels_are_the_first_axis() -> None:
    x = torch.randn(40, 3, 2, 2)
    labels = torch.tensor([7, 2, 2, 5] * 10)
    fold = folded(x.split(9), labels=labels.split(9), by="label", of=["mean", "cov", {"top": 2}])
    assert fold.labels == [2, 5, 7]
    assert fold.count.tolist() == [80, 40, 40]
    for number, label in enumerate(fold.labels):
        rows = x[labels == label].movedim(1, 0).flatten(1).double()
        assert_close(fold.mean[number], rows.mean(1))
        assert_close(fold.cov[number], torch.cov(rows))
        assert torch.equal(fold.top.values[number, :, 0], x[labels == label].amax((0, 2, 3)))
    with pytest.raises(hookrun.HookError, match=r"by: label: .*set hooks\.labels"):
        folded([x], by="label")


def test_nan_and_infinities_are_as_in_torch() -> None:
    x = torch.randn(5000, 3)
    x[1234, 0] = x[77, 0] = float("nan")
    x[99, 1] = float("inf")
    x[:, 2] = -float("inf")
    fold = folded(x.split(1000), of=["mean", {"quantiles": [0.0, 0.5]}, {"top": 3}])
    assert_close(fold.mean, x.double().mean(0), equal_nan=True)
    assert fold.quantiles[0].isnan().all()  # they are in samples that the sketch has thinned out
    assert fold.top.samples[0, :2].tolist() == [77, 1234]
    assert fold.top.samples[1, 0] == 99
    assert fold.top.samples[2].tolist() == [0, 1, 2]
    assert_close(fold.top.values, x.T.topk(3).values, equal_nan=True)


def test_a_number_for_each_sample_is_one_element() -> None:
    fold = folded([torch.arange(6.0)], per="element", of=["mean", {"top": 2}])
    assert fold.mean.tolist() == [2.5]
    assert fold.top.samples.tolist() == [[5, 4]]


@pytest.mark.parametrize("hook", ["forward", "output_grad"])
def test_the_calls_of_a_forward_see_the_same_rows(hook: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x * 1) * 2)

    weights = torch.rand(3, 4, 2)
    model = Twice()
    fold = {"select": "inner", "hook": hook, "action": "fold", "of": [{"top": 12}], "dim": 1}
    with hookrun.hooked(model, {"hooks": {"f": fold}}) as hooks:
        for weight in weights:
            x = weight.clone().requires_grad_()
            (model(x) * weight).sum().backward()
    expected = weights.flatten(0, 1).argsort(0, descending=True)
    assert torch.equal(hooks.folds["f"]["inner"].top.samples, expected.T)


def test_index_and_data_choose_what_is_folded() -> None:
    x = torch.randn(12, 4)
    assert_close(folded([x], index=":, 1:3", of="mean").mean, x[:, 1:3].double().mean(0))
    above = folded(
        [x], list(torch.arange(12)[None]), of=["mean", {"top": 1}], when={"value": {"of": "max", "above": 1}}
    )
    chosen = x[x.amax(1) > 1]
    assert_close(above.mean, chosen.double().mean(0))
    assert torch.equal(above.top.samples[:, 0], torch.where(x.amax(1, keepdim=True) > 1, x, -9).argmax(0))


def test_the_plan_says_which_dimension_is_the_channel() -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 1))
    plan = hookrun.compile(
        {"h": {"select": "0", "hook": "forward", "action": "fold", "of": "cov"}},
        model,
        example=((torch.randn(4, 1, 8, 8),), {}),
    )
    assert "h: channels: dimension 1 of [4, 16, 8, 8]; holds 2.18 kB, on 0" in str(plan)


def test_the_kind_of_module_shows_its_channels_or_the_plan_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 1), nn.LayerNorm(8), nn.GELU())
    plan = hookrun.compile(
        {"h": {"select": "*", "hook": "forward", "action": "fold"}},
        model,
        example=((torch.randn(4, 1, 8, 8),), {}),
    )
    assert "dimension 1 of [4, 6, 8, 8]; holds" in str(plan)
    assert "dimension 3 of [4, 6, 8, 8]; holds" in str(plan)
    assert "dimension 1 of [4, 6, 8, 8] is taken, since GELU does not show which one it is" in str(plan)
    with plan.install(model) as hooks:
        model(torch.randn(4, 1, 8, 8))
    assert [len(hooks.folds["h"][path].mean) for path in "012"] == [6, 8, 6]


WRONG: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    r"`dim` of channels of a value \[4, 5, 6\] may be 1 or 2; for a sequence write tokens: all": (
        (4, 5, 6),
        {},
    ),
    r"of a value \[4, 5, 7\] may be 1 or 2": ((4, 5, 7), {"dim": 0}),
    r"of a value \[4, 5, 6, 7\] may be 1 or 2 or 3": ((4, 5, 6, 7), {"dim": 4}),
    r"of a value \[4\] may be none \(use per: element\)": ((4,), {}),
    r"it would hold 3.2 GB for 20,000 units": ((4, 20_000), {"of": "cov"}),
}


@pytest.mark.parametrize(("says", "case"), WRONG.items(), ids=list(WRONG))
def test_what_could_be_either_is_refused(says: str, case: Any) -> None:
    shape, keys = case
    hook = {"select": "0", "hook": "forward", "action": "fold", **keys}
    with pytest.raises(hookrun.CompileError, match=says):
        hookrun.compile({"h": hook}, IDENTITY, example=((torch.randn(shape),), {}))


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_dim_names_the_channels_of_a_sequence(dim: int) -> None:
    x = torch.randn(6, 4, 5)
    assert_close(folded([x], dim=dim).mean, x.movedim(dim, 0).flatten(1).double().mean(1))


def test_padding_does_not_count_under_tokens() -> None:
    model = nn.Sequential(nn.Embedding(50, 3))
    ids = torch.randperm(50)[:24].view(4, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0]])
    hook = {"select": "0", "hook": "forward", "action": "fold", "of": EVERYTHING, "tokens": "all"}
    with hookrun.hooked(model, {"h": hook}) as hooks:
        for rows in ([0, 1], [2, 3]):
            hooks.samples = rows
            hooks.tokens(ids[rows], mask[rows])
            model(ids[rows])
    fold = hooks.folds["h"]["0"]
    x = model(ids).detach()
    real = x[mask.bool()]
    assert_close(fold.mean, real.double().mean(0))
    assert_close(fold.cov, torch.cov(real.T.double()))
    for channel in range(3):
        of_channel = x[..., channel].masked_fill(mask == 0, -99)
        values, samples = of_channel.amax(1).topk(3)
        assert torch.equal(fold.top.values[channel], values)
        assert torch.equal(fold.top.samples[channel], samples)
        columns = of_channel.argmax(1)[samples]
        assert fold.top.positions[channel].tolist() == (columns - mask.argmax(1)[samples]).tolist()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_counts_once(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    x = torch.randn(5, 3, requires_grad=True)
    spec = {
        "out": {"select": "1", "hook": "forward", "action": "fold"},
        "grad": {"select": "1", "hook": "output_grad", "action": "fold"},
    }
    with hookrun.hooked(model, spec) as hooks:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert hooks.folds["out"]["1"].count == 5
    assert_close(hooks.folds["out"]["1"].mean, model(x).detach().double().mean(0))
    assert hooks.folds["grad"]["1"].mean.tolist() == [1.0] * 4


def test_a_saved_state_goes_on_bit_by_bit() -> None:
    x = torch.randn(3000, 3)
    hook = {"select": "0", "hook": "forward", "action": "fold", "of": EVERYTHING}
    plan = hookrun.compile({"h": hook}, IDENTITY, example=((x[:4],), {}))
    with plan.install(IDENTITY) as hooks:
        for batch in x[:1700].split(100):
            IDENTITY(batch)
        state = hooks.state_dict()
        for batch in x[1700:].split(100):
            IDENTITY(batch)
        whole = hooks.folds["h"]["0"]
    with plan.install(IDENTITY) as hooks:
        hooks.load_state_dict(state)
        for batch in x[1700:].split(100):
            IDENTITY(batch)
        resumed = hooks.folds["h"]["0"]
    for name, tensor in whole.tensors.items():
        assert torch.equal(resumed.tensors[name], tensor), name


N = 300_000
ORDERS: dict[str, Callable[[], Tensor]] = {
    "sorted": lambda: torch.arange(N),
    "reversed": lambda: torch.arange(N).flip(0),
    "constant": lambda: torch.ones(N),
    "heavy tails": lambda: torch.randn(N, generator=torch.Generator().manual_seed(1)).pow(9),
    "halves": lambda: torch.cat([torch.arange(0, N, 2), torch.arange(1, N, 2)]),
    "waves": lambda: (torch.arange(N) % 2048 * 1000).sin(),
}


@pytest.mark.parametrize("order", ORDERS)
def test_quantiles_keep_their_rank_in_any_order(order: str) -> None:
    x = ORDERS[order]().float()
    at = (0.0, 0.01, 0.25, 0.5, 0.9, 0.999, 1.0)
    half, other = Folding(Wanted(at=at)), Folding(Wanted(at=at))
    for number, part in enumerate(x.split(7_001)):  # as on two ranks
        seen = SeenRows(part[:, None, None], keys_of(torch.arange(len(part)), "val"))
        (half, other)[number % 2].add(seen, [1], [])
    half.load_state_dict(other.state_dict())
    found = half.result()
    assert found is not None
    assert found.count == N
    bound = torch.log2(torch.tensor(N / 1024)) / 4096 * N + 1
    assert bound < 0.0025 * N
    for value, share in zip(found.quantiles[0], at, strict=True):
        rank = share * (N - 1)
        assert (x < value).sum() - bound <= rank <= (x <= value).sum() + bound, share
