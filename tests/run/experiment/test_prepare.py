"""prepare() builds the model and proves that everything fits; no data is read, nothing written, nothing left set."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hookrun
from hookrun.errors import CompileError, Problem, SpecError
from hookrun.run.experiment import building
from hookrun.run.experiment.building import build
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.prepared import Parts, Prepared
from hookrun.run.experiment.proving import structure
from hookrun.run.experiment.task import model_key
from hookrun.run.tasks import JobCache, check_jobs, parse_experiment, prepare

pytestmark = pytest.mark.usefixtures("no_data_is_read")

BIAS = {"select": "relu1", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}
PLAIN: dict[str, Any] = {
    "model": {"name": "cnn"}, "data": {"name": "digits"}, "compute": {"device": "cpu", "threads": 1}
}  # fmt: skip


CAPTURE = {"select": "fc", "hook": "forward", "action": "capture"}


def prepared(hooks: dict[str, Any] | None = None, **sections: Any) -> Prepared:
    return prepare(parse_experiment({**PLAIN, "hooks": hooks or {}, **sections}))


def refusal(hooks: dict[str, Any] | None = None, **sections: Any) -> str:
    with pytest.raises((SpecError, CompileError)) as caught:
        prepared(hooks, **sections)
    return str(caught.value)


def test_the_weights_of_the_network_follow_the_seed() -> None:
    first = prepared(seed=1).model.state_dict()["fc.weight"]
    again = prepared(seed=1).model.state_dict()["fc.weight"]
    other = prepared(seed=2).model.state_dict()["fc.weight"]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_process_is_not_changed() -> None:
    before = torch.get_rng_state(), torch.get_num_threads()
    model = prepared({"h": CAPTURE, "g": CAPTURE | {"hook": "grad"}}).model
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    for module in model.modules():
        assert not module._forward_hooks
    for parameter in model.parameters():
        assert parameter.grad is None
    refusal({"h": CAPTURE | {"select": "nowhere"}})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


@pytest.mark.parametrize(
    ("sections", "samples"),
    [
        ({"task": {"name": "train"}, "train": {"epochs": 3}}, 3 * 1797),
        ({"task": {"name": "train"}, "train": {"epochs": 1, "limit_batches": 2}}, 2 * 128),
        ({"task": {"name": "train"}, "train": {"epochs": 1, "limit_batches": 20}}, 1280 + 359),
        ({"task": {"name": "train"}, "train": {"steps": 5}}, None),
        ({"task": {"name": "predict"}}, 359),
        ({"task": {"name": "evaluate", "split": "train"}}, 1438),
    ],
)
def test_the_plan_has_the_number_of_samples_of_a_run(sections: Any, samples: int | None) -> None:
    assert prepared(**sections).plan.samples == samples


def test_dropout_in_a_compiled_training_is_told(tmp_path, monkeypatch) -> None:
    (tmp_path / "dropping_net.py").write_text(
        "from torch import nn\n\ndef net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Dropout(0.0), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOOKRUN_TRUST", "dropping_net")
    model = {"model": {"name": "python", "factory": "dropping_net:net"}}

    def told(**sections: Any) -> list[str]:
        return [note for note in prepared(**model, **sections).notes if "dropout draws" in note]

    compiled = {"compute": {**PLAIN["compute"], "compile": True}}
    assert told() == told(task={"name": "evaluate"}, **compiled) == []
    (note,) = told(**compiled)
    assert note.endswith("on 1")


def test_arguments_that_torch_refuses_are_found_here() -> None:
    optimizer = {"name": "AdamW", "lr": -1.0}
    said = refusal(train={"optimizer": optimizer})
    assert "train.optimizer: AdamW refuses its arguments: Invalid learning rate" in said
    assert prepared(train={"optimizer": optimizer}, task={"name": "evaluate"}), "which has no optimizer"


def test_data_without_the_target_or_the_split_is_an_error(tmp_path) -> None:
    save_file({"x": torch.rand(6, 1, 8, 8)}, tmp_path / "x.safetensors")
    args = {"file": str(tmp_path / "x.safetensors"), "input": "x", "target": None}
    model = {"name": "cnn", "args": {"num_classes": 3}}

    def own(**more: Any) -> dict[str, Any]:
        return {"data": {"name": "tensors", "args": args | more}, "model": model}

    assert "train.loss: is not given, and the data 'tensors' has no targets" in refusal(**own())
    assert "train.loss: 'mse' needs targets" in refusal(**own(), train={"loss": "mse"})
    assert prepared(**own(), train={"loss": "output_mean"})
    for task, split, fraction in (("predict", "val", 0), ("evaluate", "train", 1), ("train", "train", 1)):
        where = {"task": {"name": task, "split": split}, "train": {"loss": "output_mean"}}
        assert f"none is for the split '{split}'" in refusal(**own(val_fraction=fraction), **where)
        assert prepared(**own(val_fraction=1 - fraction), **where)


def test_generated_data_without_the_split_is_an_error() -> None:
    none = {"name": "fake_images", "args": {"val_size": 0}}
    assert "the split 'val' has no samples" in refusal(data=none, task={"name": "evaluate"})
    assert prepared(data=none, task={"name": "train"}), "which then validates nothing"


def test_task_modules_ignores_the_hooks() -> None:
    task = {"name": "modules"}
    found = prepared({"h": CAPTURE | {"select": "nowhere"}}, task=task)
    assert [hook.spec.name for hook in found.plan.hooks] == ["every"]


def test_only_mistakes_of_hooks_are_a_compile_error() -> None:
    mistakes = Parts(prepared().experiment, frozenset())
    mistakes.refuse()
    mistakes.add([Problem("hooks.a", "x"), Problem("hooks.a", "x")], of_hooks=True)
    mistakes.add([])
    with pytest.raises(CompileError) as refusal:
        mistakes.refuse()
    assert len(refusal.value.errors) == 1, "each once"
    mistakes.add([Problem("seed", "y")])
    with pytest.raises(SpecError):
        mistakes.refuse()


def test_what_is_not_trained_is_frozen_before_compiling() -> None:
    only = prepared({"shift": BIAS}, train={"parameters": "hook:shift"})
    assert [group.names for group in only.trained.groups] == [("relu1.shift_bias",)]
    for parameter in only.model.parameters():
        assert not parameter.requires_grad
    seen = {"g": {"select": "conv1.weight", "hook": "grad", "action": "capture"}}
    assert "conv1.weight: carries no gradient" in refusal(seen, train={"parameters": "fc"})
    assert "found an empty list" in refusal(train={"parameters": []})


def test_each_group_counts_parameters_that_hooks_fill() -> None:
    rates = {"scheduler": {"name": "OneCycleLR", "max_lr": [1, 2], "cycle_momentum": False}}
    optimizer = {"name": "SGD", "lr": 0.1, "groups": [{"select": "hook:*", "lr": 1}]}
    prepared({"shift": BIAS}, train={"optimizer": optimizer, **rates})
    assert "train.scheduler: OneCycleLR refuses its arguments" in refusal(train=rates)


def test_values_out_of_range() -> None:
    for key, value in [("clip_grad_norm", 0), ("clip_grad_value", float("inf")), ("ema", {"decay": 1})]:
        assert f"train.{key}" in refusal(train={key: value})
    assert "set one of them" in refusal(train={"clip_grad_norm": 1, "clip_grad_value": 1})
    assert "train.checkpoint.save: found 'bst'" in refusal(train={"checkpoint": {"save": "bst"}})


EVALUATED = {"task": {"name": "evaluate"}, "model": {"name": "mlp"}, "data": {"name": "digits"}}
ON_FC = {"select": "fc", "hook": "forward", "action": "add_bias", "value": 1.5}


def jobs(**changes: list[Any]) -> dict[int, Experiment]:
    """The jobs of a sweep over keys of one hook."""
    (key, values), plain = next(iter(changes.items())), dict(ON_FC)
    made = [{**EVALUATED, "hooks": {"h": {**plain, key: value}}} for value in values]
    return {number: parse_experiment(each) for number, each in enumerate(made)}


def checked(jobs: dict[int, Experiment], seconds: float) -> SimpleNamespace:
    cache = JobCache(seconds)
    refused = check_jobs(jobs, cache)
    return SimpleNamespace(refused=refused, proven=cache.proven, unproven=cache.unproven)


def test_hooks_that_differ_in_floats_are_checked_once() -> None:
    found = checked(jobs(value=[n / 7 for n in range(100)]), 60)
    assert found.proven == 1
    assert found.unproven == 0
    assert found.refused == {}
    found = checked(jobs(value=[0.5, [0.5] * 10, [0.25] * 10, [0.5] * 3, [0.25] * 3]), 60)
    assert found.proven == 3
    assert list(found.refused) == [3, 4]
    assert "the value has shape [3]" in str(found.refused[4])
    found = checked(jobs(index=["..., 3", "..., 9", "..., 30"]), 60)
    assert found.proven == 3
    assert list(found.refused) == [2]
    found = checked(jobs(when=[{"step": [0]}, {"step": [1]}]) | {7: parse_experiment(EVALUATED)}, 60)
    assert found.proven == 3
    assert not found.refused


def test_jobs_of_several_models_are_checked_apart() -> None:
    made = [{**EVALUATED, "model": {"name": name}, "hooks": {"h": {**ON_FC, "select": select}}}
            for select in ("fc", "conv1") for name in ("mlp", "cnn")]  # fmt: skip
    found = checked({number: parse_experiment(each) for number, each in enumerate(made)}, 60)
    assert list(found.refused) == [2]
    assert "matches no module of MLP" in str(found.refused[2])
    wrong = {**EVALUATED, "model": {"name": "mlp", "args": {"width": 3}}}
    found = checked(
        {1: parse_experiment(wrong), 2: parse_experiment(wrong), 5: parse_experiment(EVALUATED)}, 60
    )
    assert sorted(found.refused) == [1, 2]
    assert isinstance(found.refused[2], SpecError)
    with pytest.raises(SpecError) as alone:
        prepare(parse_experiment(wrong))
    assert str(alone.value) == str(found.refused[2])


def test_names_are_checked_even_after_the_time_limit() -> None:
    found = checked(jobs(select=["fc", "fcc"]) | {5: parse_experiment(EVALUATED)}, 0)
    assert found.proven == 0
    assert found.unproven == 3
    assert list(found.refused) == [1]


def of(**hook: Any) -> Any:
    return structure(hookrun.load_spec({"hooks": {"h": ON_FC | hook}}))


def resized(x: Any, size: float) -> Any:
    return x


def test_a_fraction_for_ones_own_function_may_be_a_size() -> None:
    hook = {"select": "fc", "hook": "forward", "action": "python", "function": resized}
    specs = [
        hookrun.load_spec({"hooks": {"h": {**hook, "args": {"size": size}}}}) for size in (0.5, 0.5, 2.5)
    ]
    assert structure(specs[0]) == structure(specs[1]) != structure(specs[2])


def test_models_are_equal_if_all_that_builds_or_freezes_them_is() -> None:
    def key(**sections: Any) -> str:
        return model_key(parse_experiment({**EVALUATED, **sections}).settings)

    train = {"task": {"name": "train"}}
    assert key() == key(seed=3, tags=["x"])
    assert key(**train) == key(**train, train={"epochs": 9, "loss": "mse"})
    different = [
        key(), key(**train), key(**train, train={"parameters": "fc"}), key(compute={"precision": "bf16"}),
        key(model={"name": "cnn"}), key(model={"name": "mlp", "args": {"width": 9}}), key(data={"name": "fake_images"}),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_a_mistake_in_a_model_is_not_made_again(monkeypatch) -> None:
    last = list[weakref.ref[nn.Module]]()
    made = list[str]()

    def load(settings: Any, info: Any, trust: Any, *, placeholder_shapes: bool) -> Any:
        assert all(model() is None for model in last), "two large models may not fit into memory"
        made.append(settings.model.name)
        if settings.model.name == "cnn":
            return None, {}, frozenset(), [Problem("model.name", "it cannot be built")]
        model = nn.Linear(1, 1)
        last.append(weakref.ref(model))
        return model, {}, frozenset(), []

    monkeypatch.setattr(building, "load_model", load)
    cache = JobCache(60)
    for name in ("mlp", "mlp", "cnn", "cnn", "mlp"):
        parts = build(
            parse_experiment({**EVALUATED, "model": {"name": name}}), "val", frozenset(), cache=cache
        )
        assert [each.where for each in parts.problems] == (["model.name"] if name == "cnn" else [])
        assert parts.model is (None if name == "cnn" else last[-1]())
        del parts
    assert made == ["mlp", "cnn", "mlp"]
