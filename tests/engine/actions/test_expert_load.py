"""`expert_load`: which experts a router chooses, recorded at the routers that the trial run shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import FAMILIES, ROUTERS, Mixture, Router, ends_with, random_mixture, tokens
from torch import Tensor, nn

import hookrun

WATCH_MOE = Path(__file__).parents[3] / "conf" / "hooks" / "watch_moe.yaml"
Spec = dict[str, dict[str, Any]]


def watching(**keys: Any) -> Spec:
    return {"load": {"select": "**", "hook": "forward", "action": "expert_load", **keys}}


@pytest.mark.parametrize("name", FAMILIES)
def test_watch_moe_counts_what_the_routers_choose(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = random_mixture(name)
    inputs = tokens(rows=3)
    chosen = dict[str, tuple[Tensor, Tensor]]()
    for path, router in ends_with(model, "gate"):
        router.register_forward_hook(lambda _, args, output, path=path: chosen.update({path: output}))
    plan = hookrun.compile(hookrun.load_spec(WATCH_MOE), model, example=((), inputs))
    paths = [match.path for match in plan.hooks[0].matches]
    assert len(paths) == ROUTERS[name]
    with plan.install(model) as hooks:
        model(**inputs)
    assert paths == list(chosen)
    for record in hooks.records:
        logits, _, indices = chosen[record["module"]]
        counts = torch.bincount(indices.flatten(), minlength=logits.shape[-1])
        assert record["counts"] == counts.tolist()
        entropy = torch.distributions.Categorical(logits=logits.detach()).entropy().mean()
        assert record["entropy"] == pytest.approx(float(entropy), rel=1e-5)
        assert record["dead"] == [expert for expert, count in enumerate(record["counts"]) if not count]
    assert [record["module"] for record in hooks.records] == paths


class Given(nn.Module):
    """A router that chooses what it is given."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros(len(x), 4), torch.ones(x.shape), x


STEPS = ([0, 1, 0], [1, 1, 0], [3, 3, 3], [3, 0, 3], [2, 0, 3])


def test_experts_die_and_run_hot_as_by_hand() -> None:
    model = nn.Sequential(Given())
    with hookrun.hooked(model, watching(select="0", dead=2, hot=1.5)) as hooks:
        for step in STEPS:
            model(torch.tensor(step).unsqueeze(1))
    for number, record in enumerate(hooks.records):
        window = [chosen for step in STEPS[max(number - 1, 0) : number + 1] for chosen in step]
        assert record["dead"] == [expert for expert in range(4) if expert not in window]
        assert record["hot"] == [expert for expert in range(4) if STEPS[number].count(expert) > 1.5 * 3 / 4]
    assert [record["dead"] for record in hooks.records] == [[2, 3], [2, 3], [2], [1, 2], [1]]


def test_a_resumed_run_knows_the_records_before() -> None:
    model = nn.Sequential(Given())
    spec = watching(select="0", dead=2)
    with hookrun.hooked(model, spec) as hooks:
        for step in STEPS:
            model(torch.tensor(step).unsqueeze(1))
    states = []
    found = []
    for step in STEPS:
        with hookrun.hooked(model, spec) as resumed:
            (site,) = resumed.sites
            for state in states[-1:]:
                site.load_state_dict(state)
            model(torch.tensor(step).unsqueeze(1))
            states.append(site.state_dict())
        found += resumed.records
    assert [record["dead"] for record in found] == [record["dead"] for record in hooks.records]


def test_without_a_trial_run_routers_show_at_their_calls() -> None:
    model = nn.Sequential(Mixture(), nn.Linear(4, 2))
    spec = watching()
    assert "which modules have the output of a router" in str(hookrun.compile(spec, model))
    with hookrun.hooked(model, spec) as hooks:
        model(torch.randn(2, 3, 4))
    (record,) = hooks.records
    assert record["module"] == "0.router"
    assert sum(record["counts"]) == 2 * 3 * 2


def test_a_call_without_tokens_leaves_no_record() -> None:
    model = nn.Sequential(Given())
    with hookrun.hooked(model, watching(select="0")) as hooks:
        model(torch.zeros(0, 1, dtype=torch.int64))
        model(torch.tensor([[0], [1]]))
    assert [record["dead"] for record in hooks.records] == [[2, 3]]


def test_a_model_without_routers_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    example = ((torch.zeros(1, 4),), {})
    with pytest.raises(hookrun.CompileError) as error:
        hookrun.compile(watching(), model, example=example)
    text = re.sub(r"\s+", " ", str(error.value))
    assert "hooks.load.expect: expected >=1 modules, 0 of those that '**' matches have the output of" in text
    shown = str(hookrun.compile(watching(expect=">=0"), model, example=example))
    assert "load: no module that '**' matches has the output of a router" in shown


class Returning(nn.Module):
    """A router of 4 experts that returns what it is given."""

    num_experts = 4

    def forward(self, *value: Tensor) -> tuple[Tensor, ...]:
        return value


CHOSEN = torch.tensor([[0, 1], [1, 3], [1, 0]], dtype=torch.int32)


def loads(*value: Tensor, **keys: Any) -> list[dict[str, Any]]:
    model = Returning()
    with hookrun.compile(watching(select="", **keys), model, example=(value, {})).install(model) as hooks:
        model(*value)
    return hooks.records


def test_a_router_may_keep_its_scores() -> None:
    (record,) = loads(torch.ones(3, 2), CHOSEN)
    assert record["counts"] == [2, 3, 0, 1]
    assert "entropy" not in record


def test_entropy_can_be_that_of_probabilities() -> None:
    shares = torch.rand(3, 4).softmax(-1)
    (record,) = loads(shares, torch.ones(3, 2), CHOSEN, entropy={"of": "probabilities"})
    assert record["entropy"] == pytest.approx(float(torch.special.entr(shares).sum(-1).mean()))


def test_a_mask_of_experts_is_not_their_numbers() -> None:
    scores = torch.rand(3, 4)
    mask = nn.functional.one_hot(scores.argmax(-1), 4)
    with pytest.raises(
        hookrun.CompileError, match=r"`num_experts`\n +record scores that are returned alone by"
    ):
        loads(mask, scores.amax(-1, keepdim=True), scores)


def test_too_few_routers_are_told() -> None:
    model = nn.Sequential(Mixture())
    with pytest.raises(hookrun.CompileError, match="expected 2 modules, 1 of those"):
        hookrun.compile(watching(expect=2), model, example=((torch.zeros(1, 3, 4),), {}))


def test_an_index_limits_the_tokens_that_count() -> None:
    model = nn.Sequential(Router(4, 5, 2))
    x = torch.randn(6, 4)
    with hookrun.compile(watching(index="1:3"), model, example=((x,), {})).install(model) as hooks:
        _, _, chosen = model(x)
    (record,) = hooks.records
    assert record["counts"] == torch.bincount(chosen[1:3].flatten(), minlength=5).tolist()


def test_three_lines_say_the_same_of_ones_own_model() -> None:
    model = Mixture()
    spec = {
        "load": {
            "select": "router",
            "hook": "forward",
            "action": "stats",
            "target": "[2]",
            "of": [{"counts": 5}],
        }
    }
    x = torch.randn(2, 3, 4)
    with hookrun.hooked(model, spec | {"same": watching()["load"]}) as hooks:
        model(x)
    load, same = hooks.records
    assert load["counts"] == same["counts"]
