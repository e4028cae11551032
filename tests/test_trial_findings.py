"""A trial run collects failures, and passes the values on unchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hookrun.errors import HookError
from hookrun.trial_findings import TrialSink

SITE: Any = SimpleNamespace(hook_name="h", path="fc", where="hook h at fc")


def test_a_failure_or_another_structure_is_a_problem_and_the_value_is_passed_on() -> None:
    def failing(value: Any) -> Any:
        raise HookError("hook h at fc: it is out of range")

    x = torch.ones(2, 3)
    findings = TrialSink()
    for op in (
        failing,
        failing,
        lambda value: value[:1],
        lambda value: (value,),
        lambda value: value.double(),
    ):
        assert findings.guard(SITE, op)(x) is x
    assert findings.guard(SITE, lambda value: {"b": value["a"]})({"a": x}) == {"a": x}
    assert findings.guard(SITE, lambda value: value * 2)(x).sum() == 12, "an edit of the same form stays"
    assert [what for _, _, what in findings.problems] == [
        "it is out of range",
        "the action changes the shape from [2, 3] to [1, 3]",
        "the action changes the type from Tensor to tuple",
        "the action changes the dtype from torch.float32 to torch.float64",
        "the action changes the members of the dict",
    ]


def test_the_first_capture_of_each_site_is_kept_without_its_graph() -> None:
    findings = TrialSink()
    keep: Any = findings.keeper(SITE)
    keep((torch.ones(2, requires_grad=True) * 2, {"a": torch.ones(3)}))
    keep(torch.ones(9))
    kept = findings.captured["h", "fc"]
    assert [list(tensor.shape) for tensor in kept] == [[2], [3]] and not any(
        each.requires_grad for each in kept
    )
