"""Statistics with options, of a dimension and of integers: equal to torch's and scipy's, or refused before the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import scipy.stats
import torch
from pydantic import ValidationError
from torch import Tensor, nn

import hookrun
from hookrun.engine.actions.statistics import (
    SIZES,
    Bins,
    Name,
    Options,
    Statistic,
    columns_of,
    numbers_of,
    rows_of,
    statistics,
)
from hookrun.engine.actions.stats import Stats, measuring
from hookrun.errors import CompileError, SpecError

NAMES = [name for name in get_args(Name) if name not in SIZES]
SHARES = [0.0, 0.01, 0.5, 0.77, 1.0]
EACH = [*NAMES, {"quantiles": SHARES}, {"histogram": {"bins": 4}}]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)
FORWARD = {"select": "0", "hook": "forward", "action": "stats"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def recorded(x: Any, of: Any, **keys: Any) -> dict[str, Any]:
    """The only record of a hook on a module that passes x on."""
    model = nn.Sequential(nn.Identity())
    hooks = {"h": {**FORWARD, "of": of, **keys}}
    with hookrun.hooked(model, hooks) as installed:
        model(x)
    (record,) = installed.records
    return {key: value for key, value in record.items() if key not in hooks["h"] and key not in ABOUT}


ABOUT = ("hook", "module", "path", "action", "mode", "epoch", "step", "call")


def close(value: Any, expected: Any, rel: float = 1e-5) -> bool:
    """Whether two records hold the same numbers."""
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            close(value[key], expected[key], rel) for key in expected
        )
    if isinstance(expected, list):
        return len(value) == len(expected) and all(map(close, value, expected, [rel] * len(expected)))
    return bool(value == pytest.approx(expected, rel=rel, abs=1e-6, nan_ok=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantiles_and_histograms_equal_torch_s(dtype: torch.dtype) -> None:
    x = normal(7, 300).to(dtype)
    seen = x.abs() if x.is_complex() else x if dtype is torch.float64 else x.float()
    for bins, between in ((64, None), (3, None), (10, (-1.0, 0.5))):
        histogram = {"bins": bins, "range": "auto" if between is None else list(between)}
        found = recorded(x, [{"quantiles": SHARES}, {"histogram": histogram}])
        expected = torch.quantile(seen, torch.tensor(SHARES, dtype=seen.dtype))
        assert found["quantiles"] == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
        low, high = between or (seen.min().item(), seen.max().item())
        assert found["histogram"]["counts"] == torch.histc(seen, bins, low, high).tolist()
        edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
        assert found["histogram"]["edges"] == pytest.approx(edges.tolist(), rel=1e-6, abs=1e-6)


def test_counts_equal_bincount() -> None:
    drawn = torch.randint(-2, 70, (9, 50), generator=torch.Generator().manual_seed(0))
    expected = torch.bincount(drawn[(drawn >= 0) & (drawn < 64)], minlength=64).tolist()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        assert recorded(drawn.to(dtype), {"counts": 64}) == {"counts": expected}
    found = recorded(drawn > 30, [{"counts": 300}, "min", "max", "mean", "bytes"])
    ones = int((drawn > 30).sum())
    assert found["counts"][:3] == [450 - ones, ones, 0]
    assert found == {**found, "min": 0, "max": 1, "mean": ones / 450, "bytes": 450}


def test_integers_are_counted_exactly() -> None:
    large = 2**53 + 1
    found = recorded(torch.tensor([large, -large, 3]), ["min", "max", "mean"])
    assert found == {"min": -large, "max": large, "mean": 1.0}
    assert type(found["max"]) is int
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        assert recorded(torch.tensor([200, 3]).to(dtype), ["min", "max", "mean"]) == {
            "min": 3, "max": 200, "mean": 101.5,
        }  # fmt: skip


def test_entropy_equals_scipy_s() -> None:
    scores = normal(2, 5, 9) * 3
    scores[0, 1, 3:] = -math.inf  # masked
    shares = scores.softmax(-1)
    expected = scipy.stats.entropy(shares.double().numpy(), axis=-1)
    assert recorded(scores, "entropy")["entropy"] == pytest.approx(expected.mean(), rel=1e-5)
    of = {"entropy": {"of": "probabilities"}}
    assert recorded(shares * 7, of)["entropy"] == pytest.approx(expected.mean(), rel=1e-5)
    by_head = recorded(scores, "entropy", dim=1)["entropy"]
    assert by_head == pytest.approx(expected.mean(0).tolist(), rel=1e-5)


def test_range_and_underflows_are_those_of_the_dtype() -> None:
    x = torch.tensor([0.0, 2.0**-20, -(2.0**-10), 3e-5, 4.0])
    for dtype, share in ((torch.float32, 0.0), (torch.float16, 0.5), (torch.bfloat16, 0.0)):
        found = recorded(x.to(dtype), ["underflows", "dynamic_range"])
        assert found == {"underflows": share, "dynamic_range": 22.0}
    nothing = recorded(torch.zeros(3), ["underflows", "dynamic_range"])
    assert all(map(math.isnan, nothing.values()))


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_dimension_gives_the_statistics_of_its_slices(dim: int, dtype: torch.dtype) -> None:
    x = (normal(3, 4, 5) * 2 + 1).to(dtype)
    of = EACH if dim != -1 else [item for item in EACH if item != "entropy"]
    found = recorded(x, of, dim=dim)
    slices = [recorded(part, of) for part in x.unbind(dim)]
    for key, values in found.items():
        assert close(values, [part[key] for part in slices]), key


def test_a_dimension_of_integers_is_counted_by_place() -> None:
    x = torch.randint(0, 9, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    for dim in (1, -1):
        found = recorded(x, [{"counts": 9}, "max", "mean"], dim=dim)
        parts = x.unbind(dim)
        assert found["counts"] == [torch.bincount(part.flatten(), minlength=9).tolist() for part in parts]
        assert found["max"] == [int(part.max()) for part in parts]
        assert found["mean"] == [float(part.double().mean()) for part in parts]


def test_sizes_are_those_of_the_whole_tensor() -> None:
    assert recorded(torch.ones(3, 4), ["numel", "bytes", "sum"], dim=1) == {
        "numel": 12, "bytes": 48, "sum": [3.0] * 4,
    }  # fmt: skip


def test_rows_of_a_graph_have_the_same_numbers() -> None:
    wanted = statistics([*NAMES, *[Options(**item) for item in EACH if isinstance(item, dict)], "numel"])
    for x in (normal(6, 4, 5) + 20, normal(6, 4, 5).double(), normal(1, 1, 1), normal(64, 8, 130)):
        for dim in (None, 1):
            measured = measuring([*EACH_OPTIONS, "numel"], dim)(x)
            numbers = numbers_of(rows_of(x, dim), wanted)
            assert numbers.shape == (
                1 if dim is None else x.shape[1],
                sum(each.length or 1 for each in wanted),
            )
            assert numbers.dtype is torch.float64
            start = 0
            for each in wanted:
                columns = numbers[:, start : start + (each.length or 1)]
                start += each.length or 1
                if each.key != "numel":
                    expected = torch.as_tensor(measured[each.key]).double().reshape(columns.shape)
                    torch.testing.assert_close(columns, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_graph_loses_no_digits_of_mean_and_spread() -> None:
    outlier = normal(4000)
    outlier[0] = 1e6
    far = normal(4000).double() + 1e5
    for x in (far.float(), outlier, torch.full((999,), 0.1), torch.tensor([1.0, -math.inf]), normal(1)):
        wanted = statistics(["mean", "std", "norm"])
        found = torch.compile(lambda x, wanted: columns_of(rows_of(x), wanted), backend="aot_eager")(
            x, wanted
        )
        expected = (
            x.double().mean(),
            x.double().std() if len(x) > 1 else torch.tensor(math.nan),
            x.double().norm(),
        )
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[0], theirs.double(), rtol=1e-6, atol=0, equal_nan=True)


EACH_OPTIONS = [Options(**item) if isinstance(item, dict) else item for item in EACH]


def test_values_are_those_that_a_record_holds() -> None:
    x = normal(5, 6)
    for item in (*EACH_OPTIONS, Options(counts=3)):
        of: Statistic = statistics([item])[0]
        seen = (x.abs() * 2).long() if of.key == "counts" else x
        numbers = numbers_of(rows_of(seen), [of])[0].tolist()
        assert close(of.value(numbers), recorded(seen, item)[of.key])


# ---- NaN, infinities, nothing ------------------------------------------------------------------------------------


def test_bins_span_the_finite_elements() -> None:
    x = torch.tensor([math.nan, 1, math.inf, 3, -math.inf, 2])
    assert recorded(x, {"histogram": {"bins": 2}})["histogram"] == {"counts": [1, 2], "edges": [1, 2, 3]}
    found = recorded(x, [{"histogram": {"bins": 2, "range": [0, 2]}}, {"quantiles": [0.5]}])
    assert found["histogram"] == {"counts": [0, 2], "edges": [0, 1, 2]}
    assert math.isnan(found["quantiles"][0])
    none = recorded(x[:1], {"histogram": {"bins": 2}})["histogram"]
    assert none["counts"] == [0, 0]
    assert all(map(math.isnan, none["edges"]))


def test_one_value_lies_in_the_middle_of_its_bins() -> None:
    found = recorded(torch.full((4,), 7.0), {"histogram": {"bins": 2}})["histogram"]
    assert found == {"counts": torch.histc(torch.full((4,), 7.0), 2).tolist(), "edges": [6, 7, 8]}


@pytest.mark.parametrize("scale", [1e-40, 1e30, 3e38])
def test_bins_hold_the_elements_between_their_edges(scale: float) -> None:
    x = (torch.rand(500, generator=torch.Generator().manual_seed(1)) * 2 - 1) * scale
    found = recorded(x, {"histogram": {"bins": 30}})["histogram"]
    edges = torch.tensor(found["edges"])
    places = (torch.searchsorted(edges, x, right=True) - 1).clamp(max=29)
    assert found["counts"] == torch.bincount(places, minlength=30).tolist()


def test_infinite_quantiles_are_infinite() -> None:
    x = torch.tensor([-math.inf, -math.inf, 0.0, math.inf, math.inf])
    found = recorded(x, {"quantiles": [0.1, 0.5, 0.9]})["quantiles"]
    assert found == [-math.inf, 0, math.inf]


def test_an_empty_tensor_has_empty_lists() -> None:
    of = ["sum", "mean", {"quantiles": [0.5]}, {"histogram": {"bins": 1}}]
    found = recorded(torch.empty(0, 2), of)
    assert close(
        found,
        {
            "sum": 0.0, "mean": math.nan, "quantiles": [math.nan],
            "histogram": {"counts": [0], "edges": [math.nan] * 2},
        },
    )  # fmt: skip
    assert recorded(torch.empty(0, 2), "sum", dim=1) == {"sum": [0.0, 0.0]}
    assert recorded(torch.empty(0, 2), "sum", dim=0) == {"sum": []}
    assert recorded(torch.empty(0).long(), {"counts": 2}) == {"counts": [0, 0]}


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "where", "message"),
    [
        ("maen", "of.0", "did you mean 'mean'?"),
        ([{"quantile": [0.5]}], "of.0.quantile", "unknown key\n      did you mean 'quantiles'?"),
        ([{"histogram": {"bin": 3}}], "of.0.histogram.bin", "did you mean 'bins'?"),
        ([{"histogram": {"range": [2, 1]}}], "of.0.histogram", "2 is not below 1"),
        (["mean", {"quantiles": [1.5]}], "of.1.quantiles.0", "found 1.5"),
        ([{"quantiles": [1.5]}], "of.0.quantiles.0", "1 configuration error\n"),
        ([{"quantiles": []}], "of.0.quantiles", "at least 1"),
        ([{"counts": 5000}], "of.0.counts", "4096"),
        (["counts"], "of.0", "expected a mapping"),
        (["mean", "histgram"], "of.1", "expected a mapping"),
        ([{"counts": 3, "entropy": {}}], "of.0", "give one of quantiles, histogram, counts, entropy"),
        ([{"quantiles": [0.1]}, {"quantiles": [0.2]}], "of", "quantiles is named twice"),
        (["entropy", {"entropy": {"of": "probabilities"}}], "of", "entropy is named twice"),
        (["mean", "std", "mean"], "of", "mean is named twice"),
        ([{"counts": 4096}, "mean"], "of", "4,097 numbers"),
        ([{"entropy": None}], "of.0", "entropy is empty"),
    ],
)
def test_a_mistake_in_an_item_is_named_at_its_key(of: Any, where: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        hookrun.compile({"h": {**FORWARD, "of": of}}, nn.Sequential(nn.Identity()))
    assert f"hooks.h.{where}: " in str(caught.value)
    assert message in str(caught.value)


def refused(make: Callable[[Tensor], Any], **keys: Any) -> str:
    """What the trial run says of a hook on a module that makes the value."""

    class Maker(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return make(x)

    model = nn.Sequential(Maker())
    try:
        hookrun.compile({"h": {**FORWARD, **keys}}, model, example=((torch.ones(2, 3),), {}))
    except CompileError as error:
        return str(error)
    return ""


def test_what_a_tensor_does_not_have_is_refused_before_the_run() -> None:
    def whole(x: Tensor) -> Tensor:
        return x.long()

    said = refused(whole)
    assert "hooks.h: on 0: the tensor is int64" in said
    assert "counts, min, max and mean, not std, norm: name" in said
    assert not refused(whole, of=["mean", "min", {"counts": 3}])
    assert not refused(whole, of=["bytes"])
    assert "not zeros" in refused(lambda x: (x, x.long()), target="[1]", of="zeros")
    assert "counts is of integers, and the tensor is float32" in refused(lambda x: x, of={"counts": 3})
    assert "dim: 2 is not a dimension of the tensor, whose shape is [2, 3]" in refused(lambda x: x, dim=2)
    assert "keeps the last dimension" in refused(lambda x: x, dim=1, of="entropy")
    assert "5,000 places" in refused(lambda x: x.new_ones(2, 5000), dim=1, of="mean")
    assert not refused(lambda x: x.new_ones(2, 4096), dim=1, of="mean")
    assert "`index`" in refused(lambda x: x.new_ones(2, 3000), dim=-1, of=["mean", "std"])


def test_the_plan_says_which_modules_record_nothing() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    hooks: dict[str, Any] = {
        "floats": {"select": "**", "hook": "forward_pre", "action": "stats"},
        "rule": {"select": "**", "hook": "forward_pre", "action": "check", "of": "norm", "max": 1e9},
        "counts": {"select": "**", "hook": "forward_pre", "action": "stats", "of": {"counts": 9}},
    }
    tokens = torch.tensor([[1, 2, 2]])
    plan = hookrun.compile(hooks, model, example=((tokens,), {}))
    whole = ", on (root), 0\n"
    assert "floats: records nothing, since the tensor is int64, and of integers there" in str(plan)
    assert "rule: records nothing, since the tensor is int64" in str(plan)
    assert str(plan).count(whole) == 2
    assert "counts: records nothing, since counts is of integers, and the tensor is float32" in str(plan)
    idle = "fired and found no tensor for its action on"
    with pytest.warns(hookrun.HookrunWarning, match=idle), plan.install(model) as installed:
        model(tokens)
    seen = {(record["hook"], record["module"]) for record in installed.records}
    assert seen == {("counts", ""), ("counts", "0"), ("floats", "1")}


def test_of_several_tensors_those_are_recorded_that_have_the_statistics() -> None:
    router = nn.Module()
    router.forward = lambda x: (x, (x > 0).long())
    model = nn.Sequential(router)
    hooks: dict[str, Any] = {
        name: {**FORWARD, "of": of}
        for name, of in {
            "floats": ["mean", "max"],
            "integers": [{"counts": 2}, "mean"],
            "all": ["numel"],
        }.items()
    }
    with hookrun.hooked(model, hooks) as installed:
        model(torch.tensor([1.0, -1.0, 2.0]))
    seen = [(record["hook"], record["path"]) for record in installed.records]
    assert sorted(seen) == [("all", "[0]"), ("all", "[1]"), ("floats", "[0]"), ("integers", "[1]")]


def test_saved_integers_are_left_out() -> None:
    model = nn.Sequential(nn.MaxPool1d(2, return_indices=False))
    hooks = {"h": {"select": "0", "hook": "saved_tensors", "action": "stats", "of": ["mean"]}}
    x = torch.ones(1, 1, 4, requires_grad=True)
    with hookrun.compile(hooks, model, example=((x,), {})).install(model) as installed:
        model(x).sum().backward()
    assert {record["mean"] for record in installed.records} <= {1.0}


def test_options_are_shown_as_they_are_written() -> None:
    of = [{"histogram": {"bins": 3}}, {"quantiles": [0.5]}, {"entropy": {"of": "probabilities"}}]
    assert [str(item) for item in Stats(of=of).of] == [  # type: ignore[arg-type]  # as pydantic converts it
        "histogram: {bins: 3, range: auto}", "quantiles: [0.5]", "entropy: {of: probabilities}",
    ]  # fmt: skip
    with pytest.raises(ValidationError):
        Bins(bins=0)
