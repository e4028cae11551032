"""`project`: x - (x·v) v along the last dimension, of a direction or a subspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_site import build
from pydantic import ValidationError
from torch import Tensor, nn
from torch.testing import assert_close

import hookrun
from hookrun.engine.actions.project import Project

LISTED = [3.0, 0.0, -4.0, 12.0]
V = torch.tensor(LISTED) / 13


def hooked(x: Tensor, **keys: Any) -> Tensor:
    """What a module passes on under the hook."""
    model = nn.Sequential(nn.Identity())
    spec = {"h": {"select": "0", "hook": "forward", "action": "project", **keys}}
    with hookrun.hooked(model, spec):
        return model(x)


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (4,), (0, 4)], ids=str)
def test_the_direction_is_removed_or_kept_alone(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    part = (x @ V)[..., None] * V
    assert_close(build(Project(direction=LISTED))(x), x - part)
    assert_close(build(Project(direction=LISTED, remove=False))(x), part)


def test_the_gradient_is_projected_as_the_value_is() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    seen = torch.randn(5, 4)
    build(Project(direction=LISTED))(x).backward(seen)
    assert_close(x.grad, seen - (seen @ V)[:, None] * V)


def test_a_subspace_is_orthonormalised_also_of_dependent_vectors() -> None:
    rows = torch.randn(2, 4, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64)
    onto = torch.linalg.pinv(rows) @ rows
    for spanned in (rows, torch.cat([rows, rows.sum(0, keepdim=True), 1e-9 * rows[:1]])):
        subspace = spanned.tolist()
        assert_close(build(Project(subspace=subspace))(x), x - x @ onto)
        assert_close(build(Project(subspace=subspace, remove=False))(x), x @ onto)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_half_precision_rounds_the_result_only(dtype: torch.dtype, scale: float) -> None:
    x = (torch.randn(64, 4) * 1000).to(dtype)
    expected = x.double() - (x.double() @ V.double())[:, None] * V.double()
    listed = [number * scale for number in LISTED]
    for keys in ({"direction": listed}, {"subspace": [listed]}):
        assert_close(build(Project(**keys))(x), expected.to(dtype), rtol=0.01, atol=0.01)


def test_autocast_leaves_the_projection_in_its_precision() -> None:
    x = torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        new = build(Project(subspace=[LISTED]))(x)
    assert_close(new, x - (x @ V)[:, None] * V)


def test_each_position_can_have_its_own_direction() -> None:
    x = torch.randn(2, 3, 4)
    directions = torch.randn(3, 4)
    v = nn.functional.normalize(directions, dim=-1)
    assert_close(hooked(x, direction=directions), x - (x * v).sum(-1, keepdim=True) * v)


def test_a_part_is_projected_along_its_own_last_dimension() -> None:
    x = torch.randn(5, 6)
    new = hooked(x, direction=LISTED, index=":, 1:5")
    assert_close(new[:, 1:5], x[:, 1:5] - (x[:, 1:5] @ V)[:, None] * V)
    assert torch.equal(new[:, [0, 5]], x[:, [0, 5]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_the_dtype_of_the_direction_may_be_another_one(dtype: torch.dtype) -> None:
    x = torch.randn(5, 4)
    assert_close(hooked(x, direction=torch.tensor(LISTED).to(dtype)), x - (x @ V)[:, None] * V)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"direction": [0.0, 0, 0, 0]}, "a direction is 0"),
        ({"direction": [1.0, float("nan"), 0, 0]}, "not finite"),
        ({"subspace": [[1.0, 0, 0, 0], [0, 0, 0, 0]]}, "a direction is 0"),
        ({"subspace": LISTED}, r"shape \[4\], expected \[vectors, elements\]"),
        ({"direction": [1.0, 2, 3]}, r"shape \[3\], which does not broadcast"),
        ({"subspace": [[1.0]]}, r"shape \[1\], which does not broadcast"),
        ({"direction": torch.zeros(4)}, "a direction is 0"),
        ({"direction": torch.empty(0)}, r"has shape \[0\]"),
        ({"direction": torch.tensor([1j, 0, 0, 0])}, "complex"),
    ],
)
def test_what_has_no_direction_is_refused_before_the_model_runs(keys: dict[str, Any], what: str) -> None:
    model = nn.Sequential(nn.Identity())
    spec = {"hooks": {"h": {"select": "0", "hook": "forward", "action": "project", **keys}}}
    with pytest.raises(hookrun.CompileError, match=what):
        hookrun.compile(spec, model, example=((torch.ones(2, 4),), {}))


@pytest.mark.parametrize(
    "keys", [{}, {"direction": 1.0}, {"direction": LISTED, "subspace": [LISTED]}, {"subspace": lambda x: x}]
)
def test_it_takes_one_direction_or_one_subspace(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"give direction or subspace|found the number|is one for all"):
        Project(**keys)
