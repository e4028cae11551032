"""An action that does something undeclared is an error, never a different result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.actions import Action
from hookrun.actions.base import HookSite
from hookrun.actions.fields import Meaning
from hookrun.hook_types import HOOK_TYPES
from hookrun.spec import HookSpec, Spec
from hookrun.spec.hook import HookKeys

X = torch.ones(2, 3)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


def spec_of(action: Action, hook: str = "forward", **keys: Any) -> Spec:
    return Spec((HookSpec("h", HookKeys(select="0", hook=hook, **keys), action),))


class Doubles(Action):
    """Base of actions whose only effect is `act`."""

    action_name = "doubles"
    hook_types = frozenset(HOOK_TYPES.values())

    def build(self, site: HookSite) -> Callable[[Any], Any]:
        return lambda x: self.act(site, x)

    def act(self, site: HookSite, x: Any) -> Any:
        return x * 2


class Draws(Doubles):
    def act(self, site: HookSite, x: Tensor) -> Tensor:
        return x + torch.empty_like(x).normal_(generator=site.generator(x))


class Reads(Doubles):
    def act(self, site: HookSite, x: Tensor) -> Tensor:
        return x + site.args[0]


class Keeps(Doubles):
    observes = True
    scope = "value"

    def build(self, site: HookSite) -> Callable[[Any], Any]:
        return site.keep()


class Returns(Doubles):
    observes = True


class ReturnsAll(Returns):
    scope = "value"


class Reshapes(Doubles):
    def act(self, site: HookSite, x: Tensor) -> Tensor:
        return x.sum(0)


class Widens(Doubles):
    def act(self, site: HookSite, x: Tensor) -> Tensor:
        return x.double()


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (Draws(), "uses `generator` of its site: name it in `uses`"),
        (Reads(), "uses `args` of its site"),
        (Keeps(), "uses `keep` of its site"),
        (Returns(), "declares `observes = True` and returns a value"),
        (ReturnsAll(), "declares `observes = True` and returns a value"),
        (Reshapes(), r"changes the shape from \[2, 3\] to \[3\]"),
        (Widens(), "changes the dtype from torch.float32 to torch.float64"),
    ],
)
def test_an_undeclared_effect_is_an_error_of_the_hook(action: Action, says: str) -> None:
    model = net()
    with pytest.raises(hookrun.HookError, match=says), hookrun.compile(spec_of(action), model).install(model):
        model(X)


@pytest.mark.parametrize(
    "action", [Draws(), Reads(), Returns(), Reshapes(), Widens()], ids=lambda a: type(a).__name__
)
def test_with_an_example_it_is_an_error_before_the_run(action: Action) -> None:
    with pytest.raises(hookrun.CompileError, match=r"hooks\.h: on 0"):
        hookrun.compile(spec_of(action), net(), example=((X,), {}))


def test_a_part_is_not_filled_by_broadcasting() -> None:
    """`index` writes the result back into the part: another shape would be broadcast without an error."""
    model, plan = net(), hookrun.compile(spec_of(Reshapes(), index="0:2"), net())
    with pytest.raises(hookrun.HookError, match="changes the shape"), plan.install(model):
        model(X)


class Freezes(Doubles):
    scope = "module"

    def act(self, site: HookSite, x: Any) -> None:
        x.requires_grad_(False)


class Adds(Doubles):
    scope = "module"

    def act(self, site: HookSite, x: Any) -> None:
        x.register_parameter("extra", nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (Freezes(), 'does not declare `does = "freeze"`'),
        (Adds(), "adds 'extra', which none of its fields names"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_effects_of_apply_on_parameters_must_be_declared(action: Action, says: str) -> None:
    model = net()
    with (
        pytest.raises(hookrun.HookError, match=says),
        hookrun.compile(spec_of(action, hook="apply"), model).install(model),
    ):
        pass


def test_declared_freezing_and_adding_are_accepted() -> None:
    class Declared(Freezes):
        does = "freeze"

    class Named(Adds):
        parameter: Annotated[str, Meaning.ADDED_NAME] = "extra"

    model = net()
    with hookrun.compile(spec_of(Declared(), hook="apply"), model).install(model):
        assert not model[0].weight.requires_grad
    with hookrun.compile(spec_of(Named(), hook="apply"), model).install(model):
        assert "0.extra" in dict(model.named_parameters())
