"""Jobs of a sweep that are checked together: equal models are built, and equal hooks tried, once."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import hookrun
from hookrun.errors import Problem, SpecError
from hookrun.spec import Experiment
from hookrun.tasks import JobCache, check_jobs, parse_experiment, prepare
from hookrun.tasks.base import model_key
from hookrun.tasks.run import prepare as preparation
from hookrun.tasks.run.prepare import build, structure

PLAIN = {"task": {"name": "evaluate"}, "model": {"name": "mlp"}, "data": {"name": "digits"}}
BIAS = {"select": "fc", "hook": "forward", "action": "add_bias", "value": 1.5}


def jobs(**changes: list[Any]) -> dict[int, Experiment]:
    """The jobs of a sweep over keys of one hook."""
    (key, values), plain = next(iter(changes.items())), dict(BIAS)
    made = [{**PLAIN, "hooks": {"h": {**plain, key: value}}} for value in values]
    return {number: parse_experiment(each) for number, each in enumerate(made)}


def checked(jobs: dict[int, Experiment], seconds: float) -> SimpleNamespace:
    cache = JobCache(seconds)
    refused = check_jobs(jobs, cache)
    return SimpleNamespace(refused=refused, proven=cache.proven, unproven=cache.unproven)


def test_shapes_are_checked_once_for_hooks_that_differ_in_floating_point_numbers() -> None:
    found = checked(jobs(value=[n / 7 for n in range(100)]), 60)
    assert (found.proven, found.unproven, found.refused) == (1, 0, {})
    found = checked(jobs(value=[0.5, [0.5] * 10, [0.25] * 10, [0.5] * 3, [0.25] * 3]), 60)
    assert found.proven == 3 and list(found.refused) == [3, 4]
    assert "the value has shape [3]" in str(found.refused[4])
    found = checked(jobs(index=["..., 3", "..., 9", "..., 30"]), 60)
    assert found.proven == 3 and list(found.refused) == [2]
    found = checked(jobs(when=[{"step": [0]}, {"step": [1]}]) | {7: parse_experiment(PLAIN)}, 60)
    assert found.proven == 3 and not found.refused


def test_jobs_of_several_models_are_each_checked_against_their_own() -> None:
    made = [{**PLAIN, "model": {"name": name}, "hooks": {"h": {**BIAS, "select": select}}}
            for select in ("fc", "conv1") for name in ("mlp", "cnn")]  # fmt: skip
    found = checked({number: parse_experiment(each) for number, each in enumerate(made)}, 60)
    assert list(found.refused) == [2] and "matches no module of MLP" in str(found.refused[2])
    wrong = {**PLAIN, "model": {"name": "mlp", "args": {"width": 3}}}
    found = checked({1: parse_experiment(wrong), 2: parse_experiment(wrong), 5: parse_experiment(PLAIN)}, 60)
    assert sorted(found.refused) == [1, 2] and isinstance(found.refused[2], SpecError)
    with pytest.raises(SpecError) as alone:
        prepare(parse_experiment(wrong))
    assert str(alone.value) == str(found.refused[2])


def test_names_are_checked_even_after_the_time_limit() -> None:
    found = checked(jobs(select=["fc", "fcc"]) | {5: parse_experiment(PLAIN)}, 0)
    assert (found.proven, found.unproven, list(found.refused)) == (0, 3, [1])


def of(**hook: Any) -> Any:
    return structure(hookrun.load_spec({"hooks": {"h": BIAS | hook}}))


def resized(x: Any, size: float) -> Any:
    return x


def test_a_fraction_among_the_arguments_of_ones_own_function_may_be_a_size() -> None:
    hook = {"select": "fc", "hook": "forward", "action": "python", "function": resized}
    specs = [
        hookrun.load_spec({"hooks": {"h": {**hook, "args": {"size": size}}}}) for size in (0.5, 0.5, 2.5)
    ]
    assert structure(specs[0]) == structure(specs[1]) != structure(specs[2])


def test_models_are_equal_if_all_that_builds_or_freezes_them_is() -> None:
    def key(**sections: Any) -> str:
        return model_key(parse_experiment({**PLAIN, **sections}).settings)

    train = {"task": {"name": "train"}}
    assert key() == key(seed=3, tags=["x"]) and key(**train) == key(
        **train, train={"epochs": 9, "loss": "mse"}
    )
    different = [
        key(), key(**train), key(**train, train={"parameters": "fc"}), key(compute={"precision": "bf16"}),
        key(model={"name": "cnn"}), key(model={"name": "mlp", "args": {"width": 9}}), key(data={"name": "fake_images"}),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_one_model_at_a_time_is_kept_and_a_mistake_in_it_is_not_made_again(monkeypatch) -> None:
    last, made = list[weakref.ref[nn.Module]](), list[str]()

    def load(settings: Any, info: Any, trust: Any, *, stands_in: bool) -> Any:
        assert all(model() is None for model in last), "two large models may not fit into memory"
        made.append(settings.model.name)
        if settings.model.name == "cnn":
            return None, {}, frozenset(), [Problem("model.name", "it cannot be built")]
        model = nn.Linear(1, 1)
        last.append(weakref.ref(model))
        return model, {}, frozenset(), []

    monkeypatch.setattr(preparation, "load_model", load)
    cache = JobCache(60)
    for name in ("mlp", "mlp", "cnn", "cnn", "mlp"):
        parts = build(parse_experiment({**PLAIN, "model": {"name": name}}), "val", frozenset(), cache=cache)
        assert [each.where for each in parts.problems] == (["model.name"] if name == "cnn" else [])
        assert parts.model is (None if name == "cnn" else last[-1]())
        del parts
    assert made == ["mlp", "cnn", "mlp"]
