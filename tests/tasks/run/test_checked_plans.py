"""What a run starts from: a row and the named spans for each sample, no tensor left over, and the code that it uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from token_samples import prompts
from torch import Tensor

import hookrun
from hookrun.errors import CompileError, Problem, SpecError
from hookrun.run_values import PendingRun
from hookrun.spec import Settings
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.base import metrics_of
from hookrun.tasks.metrics.losses import load_loss
from hookrun.tasks.metrics.metrics import load_metrics
from hookrun.tasks.run import prepare as prepared
from hookrun.tasks.run.prepare import (
    Prepared,
    leftover_problems,
    missing_spans,
    own_code,
    row_problems,
    without_data,
)

BIAS = {"select": "fc", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}
MISSING = SpecError([Problem("data.root", "there is no folder /nowhere")])
ROME = {"prompt": "Rome is", "spans": {"town": "Rome", "verb": "is"}}
OWN_NAMES = ("model", "data", "loss", "right", "step", "halving")


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
    assert row_problems(plan(value=rows), 5, trains=False) == []
    assert rows.asked == 1, "once for all modules"
    problems = row_problems(plan(value=rows, minus=Rows(6)), 7, trains=False)
    assert [(problem.where, problem.what) for problem in problems] == [
        ("hooks.h.value", "no rows of [5, 6]"),
        ("hooks.h.minus", "no rows of [6]"),
    ]
    others = {"tensor": torch.ones(2), "later": PendingRun("base"), "drawn": Rows(0, draws=True)}
    assert row_problems(plan(**others), 7, trains=False) == []
    assert row_problems(plan(value=Rows(0)), None, trains=False) == []


def test_samples_of_validation_have_no_rows_of_their_own() -> None:
    (problem,) = row_problems(plan(value=Rows(9)), 7, trains=True)
    assert problem.where == "hooks.h.value" and "validation samples have no rows" in problem.what
    assert row_problems(plan("train", value=Rows(9)), 7, trains=True) == []


def test_extra_tensors_of_a_weights_file_must_be_parameters_that_hooks_add(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"

    def found(hooks: dict[str, Any], **more: Any) -> Prepared:
        ready = prepare(parse_experiment(sections(hooks, **more)))
        assert isinstance(ready, Prepared)
        return ready

    save_file(found({}).model.state_dict() | {"fc.h_bias": torch.tensor(1.0)}, file)
    model = {"name": "mlp", "weights": str(file)}
    added = found({"h": BIAS}, model=model)
    assert list(added.leftover) == ["fc.h_bias"] and leftover_problems(added.plan, added.leftover) == []
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


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lines = [f"def {name}(output, target): pass" for name in OWN_NAMES]
    (tmp_path / "owncode.py").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOOKRUN_TRUST", "owncode")
    yield
    sys.modules.pop("owncode", None)


def own_code_of(*, trains: bool = True, **sections: Any) -> dict[str, str]:
    usual: dict[str, Any] = {"model": {"name": "mlp"}, "data": {"name": "digits"}}
    settings = parse_experiment(usual | sections).settings
    loss, metrics = load_loss(settings.train.loss), load_metrics(metrics_of(settings.task))
    return {where: code.name for where, code in own_code(settings, loss, metrics, trains=trains).items()}


@pytest.mark.usefixtures("own_package")
def test_everything_of_the_users_own_is_named_by_its_key_and_nothing_of_hookruns() -> None:
    assert own_code_of(task={"name": "train", "metrics": ["loss", "accuracy"]}) == {}
    own = own_code_of(
        model={"name": "python", "factory": "owncode:model"},
        data={"name": "python", "factory": "owncode:data"},
        task={"name": "train", "metrics": ["owncode:right", "accuracy"]},
        train={"loss": "owncode:loss"},
    )
    assert own == {
        "model.factory": "owncode:model",
        "data.factory": "owncode:data",
        "train.loss": "owncode:loss",
        "task.metrics.right": "owncode:right",
    }


@pytest.mark.usefixtures("own_package")
def test_optimizer_and_schedule_count_where_they_are_used() -> None:
    train = {"optimizer": {"name": "owncode:step"}, "scheduler": {"name": "owncode:halving"}}
    assert own_code_of(train=train) == {
        "train.optimizer.name": "owncode:step",
        "train.scheduler.name": "owncode:halving",
    }
    assert own_code_of(train=train, trains=False) == {}
    assert (
        own_code_of(train={"optimizer": {"name": "SGD"}, "scheduler": {"name": "StepLR", "step_size": 1}})
        == {}
    )


def settings_of(tmp_path: Path, *lines: object) -> Settings:
    data = {"name": "prompts", "args": {"file": prompts(tmp_path, *lines)}}
    return parse_experiment(
        {"task": {"name": "predict"}, "model": {"name": "decoder"}, "data": data}
    ).settings


def lacking(of: Settings, samples: int | None, *clauses: Any) -> list[str]:
    hook = {"select": "blocks.0", "hook": "forward", "action": "capture"}
    made = {f"h{number}": {**hook, "tokens": clause} for number, clause in enumerate(clauses)}
    asked = [(hook.keys.tokens, hook.where) for hook in hookrun.load_spec({"hooks": made}).hooks]
    return [f"{each.where}: {each.what}" for each in missing_spans(asked, of, "val", samples)]


def test_each_hook_with_a_missing_span_is_told_with_the_first_sample_without_it(tmp_path: Path) -> None:
    of = settings_of(tmp_path, ROME, {"prompt": "Oslo is", "spans": {"verb": "is"}}, {"prompt": "Paris"})
    town, verb = {"span": "town"}, {"query": {"span": "verb"}, "key": 0}
    assert lacking(of, 3, town, -1, verb, town) == [
        "hooks.h0.tokens.span: sample 1 (prompts.jsonl:2) of the split 'val' has no span 'town'",
        "hooks.h2.tokens.span: sample 2 (prompts.jsonl:3) of the split 'val' has no span 'verb'",
        "hooks.h3.tokens.span: sample 1 (prompts.jsonl:2) of the split 'val' has no span 'town'",
    ]


def test_clauses_that_do_not_need_the_span_are_not_checked(tmp_path: Path) -> None:
    of, town = settings_of(tmp_path, ROME, {"prompt": "Oslo"}), {"span": "town"}
    assert len(lacking(of, 2, town)) == 1
    assert lacking(of, 2, {**town, "missing": "skip"}, {"position": 0, "exclude": town}, None) == []


@pytest.mark.parametrize("keys", [{}, {"enabled": False}, {"when": {"step": [0]}}])
def test_hooks_that_may_not_see_a_sample_without_the_span_are_prepared(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    data = {"name": "prompts", "args": {"file": prompts(tmp_path, ROME, {"prompt": "Oslo"})}}
    hook = {"select": "blocks.0", "hook": "forward", "action": "capture", "tokens": {"span": "town"}, **keys}
    config = sections({"h": hook}, task={"name": "predict"}, model={"name": "decoder"}, data=data)
    experiment = parse_experiment(config)
    if keys:
        assert prepare(experiment)
        return
    with pytest.raises(CompileError) as refusal:
        prepare(experiment)
    assert [problem.where for problem in refusal.value.errors] == ["hooks.h.tokens.span"]


@pytest.mark.parametrize("samples, found", [(None, 0), (0, 0), (1, 0), (2, 1), (9, 1)])
def test_only_samples_in_reach_are_checked_and_at_most_so_many(
    samples: int | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = settings_of(tmp_path, ROME, {"prompt": "Oslo"})
    assert len(lacking(of, samples, {"span": "town"})) == found
    monkeypatch.setattr(prepared, "MOST_CHECKED", 1)
    assert lacking(of, samples, {"span": "town"}) == []


def test_nothing_is_read_where_no_clause_names_a_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = settings_of(tmp_path, ROME)
    monkeypatch.setattr(prepared.data, "load", lambda *_, **__: pytest.fail("the data is read"))
    assert lacking(of, 1, -1, {"id": 3}, {"span": "town", "missing": "skip"}) == []
