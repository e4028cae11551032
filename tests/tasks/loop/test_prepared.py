"""What a run starts from: rows for every sample, no tensor that nobody takes, and a plan even where data is missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hookrun.errors import CompileError, Problem, SpecError
from hookrun.run_values import NotYetRun
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.loop.prepared import Prepared, added_names, check_leftover, check_rows, without_data

BIAS = {"select": "fc", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}
MISSING = SpecError([Problem("data.root", "there is no folder /nowhere")])


def sections(hooks: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    usual = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "compute": {"device": "cpu", "threads": 1}}
    return {**usual, "hooks": hooks, **more}


class Rows:
    """Rows of the samples below `known`."""

    def __init__(self, known: int, *, draws: bool = False) -> None:
        self.known, self.draws, self.asked = known, draws, 0

    def missing(self, samples: Tensor) -> Tensor:
        self.asked += 1
        return samples[samples >= self.known]

    def lacks(self, samples: Tensor) -> str:
        return f"no rows of {samples.tolist()}"


def plan(mode: str = "any", **values: Any) -> Any:
    """A plan of one hook, whose field takes each value at the two modules that it matches."""
    at = {name: {"a": value, "b": value} for name, value in values.items()}
    keys = SimpleNamespace(when=SimpleNamespace(mode=mode))
    hook = SimpleNamespace(values=at, spec=SimpleNamespace(where="hooks.h", keys=keys))
    return SimpleNamespace(hooks=[hook])


def test_a_run_needs_a_row_for_each_sample_that_it_passes() -> None:
    rows = Rows(5)
    check_rows(plan(value=rows), 5, trains=False)
    assert rows.asked == 1, "once for all modules"
    with pytest.raises(CompileError) as caught:
        check_rows(plan(value=rows, minus=Rows(6)), 7, trains=False)
    assert [(each.where, each.what) for each in caught.value.errors] == [
        ("hooks.h.value", "no rows of [5, 6]"),
        ("hooks.h.minus", "no rows of [6]"),
    ]
    others = {"tensor": torch.ones(2), "later": NotYetRun("base"), "drawn": Rows(0, draws=True)}
    check_rows(plan(**others), 7, trains=False)
    check_rows(plan(value=Rows(0)), None, trains=False)


def test_samples_of_validation_have_no_rows_of_their_own() -> None:
    with pytest.raises(
        CompileError, match=r"hooks\.h\.value: each training sample .*\n.*when: {mode: train}"
    ):
        check_rows(plan(value=Rows(9)), 7, trains=True)
    check_rows(plan("train", value=Rows(9)), 7, trains=True)


def test_extra_tensors_of_a_weights_file_must_be_parameters_that_hooks_add(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"

    def found(hooks: dict[str, Any], **more: Any) -> Prepared:
        ready = prepare(parse_experiment(sections(hooks, **more)))
        assert isinstance(ready, Prepared)
        return ready

    save_file(found({}).model.state_dict() | {"fc.h_bias": torch.tensor(1.0)}, file)
    model = {"name": "mlp", "weights": str(file)}
    added = found({"h": BIAS}, model=model)
    assert added_names(added.plan) == ["fc.h_bias"] and list(added.leftover) == ["fc.h_bias"]
    check_leftover(added.plan, added.leftover)
    for hooks in ({"other": BIAS}, {"h": BIAS | {"enabled": False}}):
        with pytest.raises(
            SpecError, match=r"model\.weights: .* neither the model nor its hooks have: fc\.h_bias"
        ):
            found(hooks, model=model)
    assert found({"h": BIAS}, model=model, task={"name": "modules"}), "a look needs no hooks"


def test_without_the_data_the_plan_of_a_model_that_does_not_need_it_has_no_shapes() -> None:
    def compiled(error: SpecError = MISSING, model: str = "resnet18") -> Prepared:
        experiment = parse_experiment(sections({"h": BIAS}, model={"name": model}))
        return without_data(experiment, experiment.hooks, "train", error, frozenset())

    before = torch.get_rng_state()
    shown = compiled().plan
    assert shown.unchecked == "data.root: there is no folder /nowhere"
    assert [match.shape for hook in shown.hooks for match in hook.matches] == [None]
    assert torch.equal(torch.get_rng_state(), before)
    both = SpecError([*MISSING.errors, Problem("train.loss", "unknown")])
    for error, model in ((both, "resnet18"), (MISSING, "mlp")):
        with pytest.raises(SpecError) as caught:
            compiled(error, model)
        assert caught.value is error
