"""prepare() builds the model and proves that everything fits; no data is read, nothing written, nothing left set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hookrun.errors import CompileError, Problem, SpecError
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.run.prepare import Parts, Prepared, as_call

pytestmark = pytest.mark.usefixtures("no_data_is_read")

CAPTURE = {"select": "fc", "hook": "forward", "action": "capture"}


def prepared(hooks: dict[str, Any] | None = None, **sections: Any) -> Prepared:
    settings = {
        "model": {"name": "cnn"},
        "data": {"name": "digits"},
        "compute": {"device": "cpu", "threads": 1},
        "hooks": hooks or {},
    }
    return prepare(parse_experiment(settings | sections))


def refusal(hooks: dict[str, Any] | None = None, **sections: Any) -> str:
    with pytest.raises((SpecError, CompileError)) as caught:
        prepared(hooks, **sections)
    return str(caught.value)


def test_the_network_takes_its_sizes_from_the_data_and_its_weights_from_the_seed() -> None:
    first, second, other = (prepared(seed=seed).model.state_dict() for seed in (1, 1, 2))
    assert first["fc.bias"].shape == (10,)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.bias"], other["fc.bias"])


def test_the_process_and_the_model_are_not_changed() -> None:
    before = torch.get_rng_state(), torch.get_num_threads()
    model = prepared({"h": CAPTURE, "g": CAPTURE | {"hook": "grad"}}).model
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_num_threads() == before[1]
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    refusal({"h": CAPTURE | {"select": "nowhere"}})
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_num_threads() == before[1]


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


def test_arguments_that_torch_refuses_are_found_here() -> None:
    optimizer = {"name": "AdamW", "lr": -1.0}
    said = refusal(train={"optimizer": optimizer})
    assert "train.optimizer: AdamW refuses its arguments: Invalid learning rate" in said
    assert prepared(train={"optimizer": optimizer}, task={"name": "evaluate"}), "which has no optimizer"


def test_data_without_the_target_or_the_split_is_an_error(tmp_path: Path) -> None:
    save_file({"x": torch.rand(6, 1, 8, 8)}, tmp_path / "x.safetensors")
    args = {"file": str(tmp_path / "x.safetensors"), "input": "x", "target": None}
    model = {"name": "cnn", "args": {"num_classes": 3}}

    def own(**more: Any) -> dict[str, Any]:
        return {"data": {"name": "tensors", "args": args | more}, "model": model}

    assert "train.loss: 'cross_entropy' needs targets" in refusal(**own())
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


def test_named_inputs_are_keyword_arguments() -> None:
    tensor, model = torch.ones(1), torch.nn.Identity()
    assert as_call(tensor, model) == ((tensor,), {})
    assert as_call({"x": tensor}, model) == ((), {"x": tensor})


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
