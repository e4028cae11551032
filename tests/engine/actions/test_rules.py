"""`check` of a statistic, at each firing and over steps: windows, units, policies, and what it is refused for."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

import hookrun
from hookrun import CheckFailed, CompileError, HookError, HookrunError
from hookrun.engine.actions.check import Check

NAN, INF = math.nan, math.inf


def hook(**keys: Any) -> dict[str, dict[str, Any]]:
    return {"h": {"select": "", "hook": "forward", "action": "check", "policy": "warn", "of": "mean", **keys}}


def told(numbers: Iterable[float | Sequence[float]], **keys: Any) -> list[dict[str, Any]]:
    """The records when the statistic has these numbers in successive steps, that of the tensor or of each row."""
    with hookrun.hooked(nn.Identity(), hook(**keys)) as hooks:
        for number in numbers:
            hooks_see(hooks, torch.tensor(number, dtype=torch.float64).unsqueeze(-1))
        return hooks.records


def hooks_see(hooks: hookrun.Installation, x: Tensor) -> None:
    hooks.clock.model(x)
    hooks.step()


def steps(records: Iterable[Mapping[str, Any]]) -> list[int]:
    return [record["step"] for record in records]


def broken_by_hand(numbers: np.ndarray, rule: str, bound: float, n: int) -> list[int]:
    """The steps in which the rule is broken and was not in the step before, from the definitions."""
    broken = []
    for step, number in enumerate(numbers):
        before = numbers[max(step - n, 0) : step]
        window = numbers[max(step - n + 1, 0) : step + 1]
        is_broken = False
        if rule in ("max_ratio", "max_zscore") and len(before) == n:
            ratio = abs(number) / abs(before.mean())
            score = (number - before.mean()) / np.sqrt(((before - before.mean()) ** 2).sum() / (n - 1))
            is_broken = (ratio if rule == "max_ratio" else score) > bound
        elif len(window) == n:
            change = (window.max() - window.min()) / abs(window.mean())
            is_broken = {
                "max": window.min() > bound,
                "min": window.max() < bound,
                "min_change": change < bound,
            }.get(rule, False)
        broken.append(is_broken)
    return [step for step, now in enumerate(broken) if now and not (step and broken[step - 1])]


RULES = [("max", -0.3), ("min", 0.3), ("min_change", 1.5), ("max_ratio", 4.0), ("max_zscore", 1.5)]


@pytest.mark.parametrize(("rule", "bound"), RULES)
@pytest.mark.parametrize("n", [3, 7])
def test_a_rule_is_told_at_the_steps_computed_by_hand(rule: str, bound: float, n: int) -> None:
    numbers = np.random.default_rng(n).normal(size=200).cumsum() / 3 % 1.4 - 0.7
    records = told(numbers.tolist(), over={"steps": n}, **{rule: bound})
    wanted = broken_by_hand(numbers, rule, bound, n)
    assert len(wanted) > 1
    assert steps(records) == wanted
    for record in records:
        assert record["number"] == numbers[record["step"]]
        assert (record["of"], record["rule"], record["bound"], record["steps"]) == ("mean", rule, bound, n)
        assert "units" not in record


def test_a_planted_spike_is_named_at_its_step() -> None:
    numbers = [1 + 0.1 * math.sin(step) for step in range(60)]
    numbers[41] = 30.0
    (record,) = told(numbers, over={"steps": 20}, max_ratio=10)
    message = "mean is more than 10 times its mean over the 20 steps before, step 41: found 30"
    assert (record["step"], record["message"], record["number"]) == (41, message, 30.0)


def test_units_are_told_by_number_when_they_begin_to_fail() -> None:
    rows = [[0.0, 1.0, 0.0, 1.0] for _ in range(4)] + [[0.0, 1.0, 1.0, 0.0] for _ in range(4)]
    first, second = told(rows, dim=0, over={"steps": 3}, max=0.5)
    assert (first["step"], first["units"], first["number"]) == (2, [1, 3], [1.0, 1.0])
    assert first["message"] == "mean of 2 of 4 units (dim 0) stayed above 0.5 for 3 steps, step 2: units 1, 3"
    assert (second["step"], second["units"]) == (6, [1, 2])  # a unit that recovers is not told


def test_a_share_of_the_units_has_to_fail() -> None:
    rows = [[1.0, 0.0, 0.0, 0.0]] * 3 + [[1.0, 1.0, 0.0, 0.0]] * 3
    (record,) = told(rows, dim=0, share=0.5, over={"steps": 2}, max=0.5)
    assert (record["step"], record["units"]) == (4, [0, 1])


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_a_number_that_is_not_finite_is_told_at_once(number: float) -> None:
    numbers = [1.0, number, number, 1.0, 1.0, 5.0]
    first, spike = told(numbers, over={"steps": 3}, max_ratio=3)
    assert first["step"] == 1
    assert first["message"].startswith("mean is not finite, step 1: found ")
    assert spike["step"] == 5  # the window has the three steps with a 1


def test_a_mean_and_a_deviation_of_0_are_defined() -> None:
    assert steps(told([0, 0, 0, 0, 1e-9, 0, 0], over={"steps": 2}, max_ratio=10)) == [4]
    assert steps(told([2, 2, 2, 2.5, 2], over={"steps": 2}, max_zscore=100)) == [3]
    assert steps(told([2, 2, 2, 1.5, 2], over={"steps": 2}, max_zscore=100)) == []
    assert steps(told([0, 0, 0, 0], over={"steps": 3}, min_change=0.1)) == [2]
    assert steps(told([1, -1, 1, -1], over={"steps": 2}, min_change=0.1)) == []


def test_without_steps_each_firing_is_checked() -> None:
    records = told([1, 3, 4, 0, NAN], max=2.5, min=0.5)
    assert steps(records) == [1, 2, 3, 4]
    assert [record["rule"] for record in records] == ["max", "max", "min", "min"]
    assert records[0]["message"] == "mean is above 2.5, step 1: found 3"
    assert "steps" not in records[0]
    (record,) = told([[1, 3], [1, 1]], max=2.5, dim=0)
    assert (record["units"], record["number"]) == ([1], [3.0])


def test_a_check_of_a_statistic_names_the_last_good_module() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(1, 1))
    nn.init.constant_(model[2].weight, 100)
    spec = hook(select=["0", "1", "2"], of="abs_max", max=10)
    with hookrun.hooked(model, spec) as hooks:
        model(torch.ones(2, 1))
    (record,) = hooks.records
    assert (record["module"], record["last_good"]) == ("2", "1 (Identity)")


def test_the_number_of_a_step_is_the_mean_of_its_firings() -> None:
    with hookrun.hooked(nn.Identity(), hook(over={"steps": 1}, max=0)) as hooks:
        for number in (1.0, 2.0, 6.0):
            hooks.clock.model(torch.tensor([number]))
    (record,) = hooks.records
    assert (record["step"], record["number"]) == (0, pytest.approx(3.0))


def test_training_and_evaluation_have_windows_of_their_own() -> None:
    with hookrun.hooked(nn.Identity(), hook(over={"steps": 3}, max=0)) as hooks:
        for step in range(5):
            hooks.clock.model.train(step % 2 == 0)
            hooks_see(hooks, torch.ones(1))
    (record,) = hooks.records
    assert (record["mode"], record["step"]) == ("train", 4)


def test_each_call_of_a_shared_module_has_a_window() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(relu, nn.Linear(2, 3, bias=False), relu)
    nn.init.constant_(model[1].weight, -1)
    spec = hook(select="0", of="zeros", dim=1, over={"steps": 2}, max=0.9)
    with hookrun.hooked(model, spec) as hooks:
        for _ in range(3):
            hooks_see(hooks, torch.ones(4, 2))
    (record,) = hooks.records
    assert (record["call"], record["units"], record["step"]) == (1, [0, 1, 2], 1)


def test_a_window_goes_on_over_steps_in_which_it_does_not_fire() -> None:
    keys = {"over": {"steps": 3}, "max": 0, "when": {"step": {"every": 4}}}
    assert steps(told([1.0] * 20, **keys)) == [8]


def training(spec: dict[str, Any], count: int, *, state: Any = None, after: int = 0) -> tuple[Any, list[Any]]:
    """Train a small network from step `after` on; the state in the middle, and the records."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.constant_(model[0].bias[2:4], -10)  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    batches = torch.randn(count, 16, 4)
    batches[12] *= 200
    with hookrun.hooked(model, spec) as hooks:
        if state is not None:
            model.load_state_dict(state[0])
            hooks.load_state_dict(state[1])
        saved = None
        for number, batch in enumerate(batches):
            if number < after:
                continue
            if number == count // 2:
                saved = copy.deepcopy((model.state_dict(), hooks.state_dict()))
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            hooks.loss = loss
            loss.backward()
            optimizer.step()
        return saved, hooks.records


WATCHED = {
    "dead": {
        "select": "type:ReLU", "hook": "forward", "action": "check", "of": "zeros", "dim": 1,
        "over": {"steps": 5}, "max": 0.99, "policy": "warn",
    },
    "spike": {
        "select": "**", "hook": "optimizer_step_pre", "action": "check", "of": "norm",
        "over": {"steps": 9}, "max_ratio": 10, "policy": "warn",
    },
    "loss": {
        "select": "", "hook": "forward", "action": "check", "of": "loss",
        "over": {"steps": 9}, "max_zscore": 6, "policy": "warn",
    },
}  # fmt: skip


def test_a_resumed_training_tells_the_same() -> None:
    saved, records = training(WATCHED, 20)
    _, resumed = training(WATCHED, 20, state=saved, after=10)
    assert {record["hook"] for record in records} == set(WATCHED)
    assert resumed == [record for record in records if record["step"] >= 10]
    (first, *_) = records
    assert (first["hook"], first["step"], first["units"]) == ("dead", 4, [2, 3])
    assert {record["step"] for record in records if record["hook"] != "dead"} == {12}


def test_a_window_of_another_length_begins_anew() -> None:
    with hookrun.hooked(nn.Identity(), hook(over={"steps": 2}, max=0)) as hooks:
        hooks_see(hooks, torch.ones(1))
        hooks_see(hooks, torch.ones(1))
        state = hooks.state_dict()
    for keys, count in (({"over": {"steps": 3}}, 2), ({"of": "sum", "over": {"steps": 2}}, 1)):
        with hookrun.hooked(nn.Identity(), hook(**keys, max=0)) as hooks:
            hooks.load_state_dict(state, strict=False)
            for _ in range(4):
                hooks_see(hooks, torch.ones(1))
        assert steps(hooks.records) == [2 + count], keys


def test_the_policies_raise_stop_or_record_at_the_end_of_a_step() -> None:
    keys = {"over": {"steps": 2}, "max": 0}
    with hookrun.hooked(nn.Identity(), hook(**keys, policy="error")) as hooks:
        hooks_see(hooks, torch.ones(1))
        with pytest.raises(
            CheckFailed, match=r"\(root\) \(Identity\), epoch 0, step 1: mean stayed above 0 for 2 st"
        ):
            hooks_see(hooks, torch.ones(1))
    with hookrun.hooked(nn.Identity(), hook(**keys, policy="stop")) as hooks:
        hooks_see(hooks, torch.ones(1))
        assert hooks.stopped is None
        hooks_see(hooks, torch.ones(1))
        assert (
            hooks.stopped == "hook 'h' on (root) (Identity): mean stayed above 0 for 2 steps, step 1: found 1"
        )
    with (
        hookrun.hooked(nn.Identity(), hook(max=0, policy="error")) as hooks,
        pytest.raises(CheckFailed, match="epoch 0, step 0: mean is above 0, step 0: found 1"),
    ):
        hooks.clock.model(torch.ones(1))


def test_what_a_failing_step_has_seen_is_told() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        hookrun.hooked(nn.Identity(), hook(over={"steps": 9}, max=0)) as hooks,
    ):
        hooks.clock.model(torch.tensor([NAN]))
        raise ZeroDivisionError
    assert [record["message"] for record in hooks.records] == ["mean is not finite, step 0: found nan"]


def test_uncounted_passes_and_copies_leave_windows_alone() -> None:
    with hookrun.hooked(nn.Identity(), hook(over={"steps": 2}, max=0)) as hooks:
        hooks_see(hooks, torch.ones(1))
        with hooks.uncounted():
            hooks.clock.model(-torch.ones(1))
        copy.deepcopy(hooks.clock.model)(-torch.ones(1))
        hooks_see(hooks, torch.ones(1))
    assert steps(hooks.records) == [1]


def test_the_update_ratio_is_that_of_one_step() -> None:
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    spec = hook(select="**", hook="optimizer_step_post", of="update_ratio", max=1e-9, when={"step": [0, 2]})
    ratios = []
    with hookrun.hooked(model, spec) as hooks:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            old = model.weight.detach().clone()
            optimizer.step()
            ratios.append(float((model.weight.detach() - old).norm() / old.norm()))
    found = {(record["module"], record["step"]): record["number"] for record in hooks.records}
    assert found["weight", 0] == pytest.approx(ratios[0])
    assert found["weight", 2] == pytest.approx(ratios[2])
    assert set(found) == {("weight", 0), ("weight", 2), ("bias", 2)}  # a bias of zeros has no ratio yet


class LossAndScores(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.mean(), "scores": x}


def test_a_loss_is_judged_once_for_a_model_of_two_outputs() -> None:
    spec = hook(of="loss", over={"steps": 2}, max_ratio=2, policy="warn")
    model = LossAndScores()
    with hookrun.hooked(model, spec) as hooks:
        for loss in (1.0, 1.0, 5.0):
            hooks.loss = loss
            model(torch.ones(2))
            hooks.step()
    assert [(record["step"], record["number"]) for record in hooks.records] == [(2, 5.0)]


def test_a_loss_that_is_not_known_is_told_once() -> None:
    with hookrun.hooked(nn.Identity(), hook(of="loss", over={"steps": 1}, max=0)) as hooks:
        hooks.clock.model(torch.ones(1))
        for loss in (torch.tensor(1.0), 2.0):
            hooks.loss = loss
        hooks.step()
        assert [record["number"] for record in hooks.records] == [1.5]
        assert hooks.loss is None
        with pytest.warns(hookrun.HookrunWarning, match="the loss of step 1 is not known, .*: set `hooks"):
            hooks_see(hooks, torch.ones(1))
        hooks_see(hooks, torch.ones(1))
        with pytest.raises(HookrunError, match="expected one number"):
            hooks.loss = torch.ones(2)
        assert len(hooks.records) == 1


def test_a_trial_run_judges_nothing() -> None:
    example = ((torch.ones(2, 3),), {})
    spec = hook(of="loss", over={"steps": 1}, max=0, policy="error")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # an error would only end the trial with data
        hookrun.compile(spec, nn.Sequential(nn.Linear(3, 2)), example=example)
    assert [str(each.message) for each in caught] == []


def test_units_that_change_in_number_are_an_error() -> None:
    with hookrun.hooked(nn.Identity(), hook(dim=0, over={"steps": 2}, max=0)) as hooks:
        hooks_see(hooks, torch.ones(3, 2))
        hooks.records  # noqa: B018
        with pytest.raises(HookError, match="dim: 0 has 4 units now and had 3 before"):
            hooks_see(hooks, torch.ones(4, 2))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dim": 3, "max": 0}, "dim: 3 is not a dimension of the tensor"),
        ({"dim": 1, "max": 0}, "a record has at most 4,096"),
        ({"dim": 0, "max": 0, "over": {"steps": 10**8}}, "more than 4,194,304 numbers"),
    ],
)
def test_units_that_cannot_be_kept_are_refused_before_the_run(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        hookrun.compile(hook(**keys), nn.Identity(), example=((torch.ones(2, 5000),), {}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"of": {"quantiles": [0.5]}, "max": 1}, "of: quantiles is a list of numbers: check one number"),
        ({"of": {"counts": 4}, "max": 1}, "of: counts is a list"),
        ({"of": "norm"}, "nothing is left to check: give min or max"),
        ({"of": "norm", "over": {"steps": 3}}, "give min or max or min_change or max_ratio or max_zscore"),
        ({"of": "norm", "max_ratio": 3}, "`max_ratio` goes with `over`: add `over: {steps: 50}`"),
        ({"over": {"steps": 3}, "max": 1}, "`over` goes with `of`: add `of: norm`"),
        ({"dim": 1, "max": 1}, "`dim` goes with `of`"),
        ({"max_zscore": 1}, "`max_zscore` goes with `over`"),
        ({"of": "norm", "max": 1, "finite": True}, "leave it out"),
        ({"of": "norm", "max": 1, "share": 0.5}, "add `dim: 1`"),
        ({"of": "norm", "max": 1, "min": 2}, "min 2.0 is greater than max 1.0"),
        ({"of": "loss", "max": 1}, "add `over: {steps: 50}`, and leave `dim` out"),
        ({"of": "norm", "over": {"steps": 1}, "max_zscore": 1}, "more than one step"),
        ({"of": "median", "max": 1}, "Input should be 'mean'"),
    ],
)
def test_combinations_without_a_meaning_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace("{", r"\{")):
        Check(**keys)


@pytest.mark.parametrize("of", ["loss", "update_ratio"])
def test_statistics_of_one_hook_type_are_refused_elsewhere(of: str) -> None:
    with pytest.raises(HookrunError, match=f"`of: {of}` goes with"):
        hookrun.compile(hook(hook="output_grad", of=of, over={"steps": 3}, max=1), nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.float64])
def test_numbers_of_every_dtype_are_checked(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 1.0]]).to(dtype)
    with hookrun.hooked(nn.Identity(), hook(of="norm", max=2, dim=0)) as hooks:
        hooks.clock.model(x)
        hooks.clock.model(torch.empty(0, 2, dtype=dtype))
        hooks.clock.model(torch.arange(3))
    (record,) = hooks.records
    assert (record["number"], record["units"]) == ([5.0], [0])


@pytest.mark.parametrize(
    "keys", [{"of": None, "max": 2.5}, {"max": 2.5, "dim": 0}, {"max": 0, "over": {"steps": 2}}]
)
def test_a_graph_reports_what_eager_reports(keys: dict[str, Any]) -> None:
    spec = hook(**{key: value for key, value in ({"of": "abs_max"} | keys).items() if value is not None})
    records = []
    for in_graph in (False, True):
        with hookrun.hooked(nn.Identity(), spec) as hooks:
            compiled = hooks.compile(backend="eager", fullgraph=True)
            for x in (torch.tensor([1.0, -3.0]), torch.tensor([NAN, 1.0]), torch.empty(0), torch.ones(2)):
                if in_graph:
                    compiled(x)
                    hooks.step()
                else:
                    hooks_see(hooks, x)
            records.append([{**record, "last_good": None} for record in hooks.records])
    assert repr(records[0]) == repr(records[1])
    assert records[0]
