"""An edit of a router's scores that nothing reads is refused before the run; where something reads them it is not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from mixtures import Mixture, random_mixture, tokens
from torch import Tensor, nn

import hookrun

X = torch.zeros(2, 3, 4)


def editing(select: str = "router", **keys: Any) -> dict[str, dict[str, Any]]:
    hook = {"select": select, "hook": "forward", "action": "scale", "factor": 0, "target": "[0]"}
    return {"h": {**hook, **keys}}


@pytest.mark.parametrize(
    "keys",
    [{}, {"index": "..., [1]"}, {"action": "add_bias", "value": 1}, {"when": {"step": {"start": 9}}}],
    ids=str,
)
def test_an_edit_of_scores_that_nothing_reads_is_refused(keys: dict[str, Any]) -> None:
    spec = editing(**keys)
    if "action" in keys:
        del spec["h"]["factor"]
    with pytest.raises(hookrun.CompileError) as error:
        hookrun.compile(spec, Mixture(), example=((X,), {}))
    text = re.sub(r"\s+", " ", str(error.value))
    assert (
        "hooks.h: on router: nothing reads the scores after the module, which has chosen its experts" in text
    )
    assert "use action: drop_expert" in text


def test_the_routers_of_transformers_have_chosen_already() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = random_mixture("deepseek_v3")
    with pytest.raises(hookrun.CompileError, match="nothing reads the scores"):
        hookrun.compile(editing("**.gate"), model, example=((), tokens()))


def test_scores_that_the_loss_of_balance_reads_can_be_edited() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = random_mixture("mixtral", output_router_logits=True)
    plan = hookrun.compile(editing("**.gate"), model, example=((), tokens()))
    with plan.install(model):
        scores = model(**tokens()).router_logits
    assert not any(each.any() for each in scores)


class Penalized(Mixture):
    """Its loss needs the scores."""

    def forward(self, x: Tensor) -> Tensor:
        scores, shares, chosen = self.router(x)
        return self.experts(x, chosen=chosen, shares=shares) + scores.logsumexp(-1, keepdim=True)


class Returning(Mixture):
    """Whoever calls it may read the scores."""

    def forward(self, x: Tensor) -> Any:
        scores, shares, chosen = self.router(x)
        return {"mixed": self.experts(x, chosen=chosen, shares=shares), "scores": [scores]}


class Keeping(Mixture):
    """Its loss reads the scores afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        self.scores, shares, chosen = self.router(x)
        mixed: Tensor = self.experts(x, chosen=chosen, shares=shares)
        return mixed


@pytest.mark.parametrize("kind", [Penalized, Returning, Keeping])
def test_scores_that_something_reads_can_be_edited(kind: type[nn.Module]) -> None:
    plan = hookrun.compile(editing(), kind(), example=((X,), {}))
    assert plan.unchecked is None


@pytest.mark.parametrize(
    "keys",
    [
        {"target": "[1]"},
        {"target": None},
        {"action": "capture"},
        {"action": "stats"},
        {"select": "router.scores"},
    ],
    ids=str,
)
def test_other_hooks_on_a_router_are_not_refused(keys: dict[str, Any]) -> None:
    spec = editing(**keys)
    hook = spec["h"]
    if hook["action"] != "scale":
        del hook["factor"]
    if hook["target"] is None or "select" in keys:
        del hook["target"]
    assert hookrun.compile(spec, Mixture(), example=((X,), {})).unchecked is None
