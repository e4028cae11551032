"""An action that does something undeclared is an error, never a different result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from torch import nn

import hookrun
from hookrun.engine.actions import Action
from hookrun.engine.actions.base import HookSite
from hookrun.engine.actions.fields import Meaning
from hookrun.engine.hook_types import HOOK_TYPES
from hookrun.engine.spec import HookSpec, Spec
from hookrun.engine.spec.hook import HookKeys

X = torch.ones(2, 3)


class Doubles(Action):
    """Base of actions whose only effect is `act`."""

    action_name = "doubles"
    hook_types = frozenset(HOOK_TYPES.values())

    def build(self, site: HookSite) -> Callable[[Any], Any]:
        return lambda x: self.act(site, x)

    def act(self, site: HookSite, x: Any) -> Any:
        return x * 2


def doing(act: Callable[[HookSite, Any], Any], **declared: Any) -> Action:
    """An action of this effect with these declarations."""
    members = {"__module__": __name__, "act": lambda self, site, x: act(site, x), **declared}
    action: Action = type("Doing", (Doubles,), members)()
    return action


RESHAPES = doing(lambda site, x: x.sum(0))
UNDECLARED = {
    "draws": (
        doing(lambda site, x: x + torch.empty_like(x).normal_(generator=site.generator(x))),
        "uses `generator` of its site: name it in `uses`",
    ),
    "reads": (doing(lambda site, x: x + site.args[0]), "uses `args` of its site"),
    "keeps": (doing(lambda site, x: site.keep()(x), observes=True, scope="value"), "uses `keep` of its site"),
    "returns": (doing(lambda site, x: x, observes=True), "declares `observes = True` and returns a value"),
    "returns all": (
        doing(lambda site, x: x, observes=True, scope="value"),
        "declares `observes = True` and returns a value",
    ),
    "reshapes": (RESHAPES, r"changes the shape from \[2, 3\] to \[3\]"),
    "widens": (doing(lambda site, x: x.double()), "changes the dtype from torch.float32 to torch.float64"),
}


@pytest.mark.parametrize("name", UNDECLARED)
def test_an_undeclared_effect_is_an_error_of_the_hook(name: str) -> None:
    action, says = UNDECLARED[name]
    model = net()
    with pytest.raises(hookrun.HookError, match=says), hookrun.compile(spec_of(action), model).install(model):
        model(X)


@pytest.mark.parametrize("name", [name for name in UNDECLARED if name not in ("keeps", "returns all")])
def test_with_an_example_it_is_an_error_before_the_run(name: str) -> None:
    with pytest.raises(hookrun.CompileError, match=r"hooks\.h: on 0"):
        hookrun.compile(spec_of(UNDECLARED[name][0]), net(), example=((X,), {}))


def test_a_part_is_not_filled_by_broadcasting() -> None:
    """`index` writes the result back into the part: another shape would be broadcast without an error."""
    model = net()
    plan = hookrun.compile(spec_of(RESHAPES, index="0:2"), net())
    with pytest.raises(hookrun.HookError, match="changes the shape"), plan.install(model):
        model(X)


def freeze(site: HookSite, module: nn.Module) -> None:
    module.requires_grad_(False)


def add(site: HookSite, module: nn.Module) -> None:
    module.register_parameter("extra", nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(
    ("act", "says"),
    [(freeze, 'does not declare `does = "freeze"`'), (add, "adds 'extra', which none of its fields names")],
)
def test_effects_of_apply_on_parameters_must_be_declared(act: Any, says: str) -> None:
    model = net()
    plan = hookrun.compile(spec_of(doing(act, scope="module"), hook="apply"), model)
    with pytest.raises(hookrun.HookError, match=says), plan.install(model):
        pass


def test_declared_freezing_is_accepted() -> None:
    class Named(Doubles):
        scope = "module"
        parameter: Annotated[str, Meaning.ADDED_NAME] = "extra"

        def act(self, site: HookSite, x: Any) -> None:
            add(site, x)

    model = net()
    declared = doing(freeze, scope="module", does="freeze")
    with hookrun.compile(spec_of(declared, hook="apply"), model).install(model):
        assert not model[0].weight.requires_grad
    with hookrun.compile(spec_of(Named(), hook="apply"), model).install(model):
        assert "0.extra" in dict(model.named_parameters())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


def spec_of(action: Action, hook: str = "forward", **keys: Any) -> Spec:
    return Spec((HookSpec("h", HookKeys(select="0", hook=hook, **keys), action),))
