"""What a run starts from: the named spans for each sample, and no tensor of the weights left over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from token_samples import prompts

import hookrun
from hookrun.errors import CompileError, Problem, SpecError
from hookrun.spec import Settings
from hookrun.tasks import parse_experiment, prepare
from hookrun.tasks.run import prepare as prepared
from hookrun.tasks.run.prepare import Prepared, leftover_problems, missing_spans, without_data

BIAS = {"select": "fc", "hook": "forward", "action": "add_bias", "value": 0, "trainable": True}
MISSING = SpecError([Problem("data.root", "there is no folder /nowhere")])
ROME = {"prompt": "Rome is", "spans": {"town": "Rome", "verb": "is"}}


def sections(hooks: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    usual = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "compute": {"device": "cpu", "threads": 1}}
    return {**usual, "hooks": hooks, **more}


def test_extra_tensors_of_a_weights_file_must_be_parameters_that_hooks_add(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"

    def found(hooks: dict[str, Any], **more: Any) -> Prepared:
        ready = prepare(parse_experiment(sections(hooks, **more)))
        assert isinstance(ready, Prepared)
        return ready

    save_file(found({}).model.state_dict() | {"fc.h_bias": torch.tensor(1.0)}, file)
    model = {"name": "mlp", "weights": str(file)}
    added = found({"h": BIAS}, model=model)
    assert list(added.leftover) == ["fc.h_bias"] and not list(leftover_problems(added.plan, added.leftover))
    for hooks in ({"other": BIAS}, {"h": BIAS | {"enabled": False}}):
        with pytest.raises(SpecError, match=r"model\.weights: .* neither the model .*: fc\.h_bias"):
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


def test_a_span_that_is_there_twice_is_refused_only_where_it_is_used(tmp_path: Path) -> None:
    twice = {"prompt": "Rome and Rome is", "spans": {"town": "Rome", "verb": "is", "none": None}}
    of = settings_of(tmp_path, twice, {"prompt": "Rome", "spans": None})
    assert lacking(of, 1, {"span": "verb"}, -1) == []
    (said,) = lacking(of, 2, {"span": "town"})
    assert said.startswith("hooks.h0.tokens.span: sample 0 (prompts.jsonl:1) of the split 'val'")
    assert said.endswith("has more than once the text of the span 'town'")


@pytest.mark.parametrize("keys", [{}, {"enabled": False}, {"when": {"step": [0]}}])
def test_hooks_that_may_miss_a_sample_without_the_span_are_prepared(keys: dict[str, Any], tmp_path) -> None:
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


def test_nothing_is_read_where_no_clause_names_a_span(tmp_path, monkeypatch) -> None:
    of = settings_of(tmp_path, ROME)
    monkeypatch.setattr(prepared.data, "load", lambda *_, **__: pytest.fail("the data is read"))
    assert lacking(of, 1, -1, {"id": 3}, {"span": "town", "missing": "skip"}) == []
