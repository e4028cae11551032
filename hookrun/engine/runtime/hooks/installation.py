"""`apply`: runs an action on modules once, at installation. The changes stay when the hooks are removed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookrun.engine.actions.user_code import UserCodeError
from hookrun.engine.hook_types import APPLY
from hookrun.engine.runtime.hooks.base import RegisteredHook
from hookrun.engine.runtime.site import HookSite
from hookrun.errors import HookError


class AtInstallation(RegisteredHook):
    """Runs on a module once; nothing stays registered."""

    hook_types = (APPLY,)

    @staticmethod
    def run(module: nn.Module, site: HookSite, *, restored: bool = False) -> None:
        """Run the action. Raises HookError if it adds or freezes parameters without declaring it, as the plan needs.

        restored: the model's state was saved after the hook had acted: parameters and buffers get their values back,
                  but added and frozen parameters stay added and frozen
        """
        state = module.state_dict(keep_vars=True) if restored else {}
        values: dict[str, Tensor] = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and not is_lazy(value):  # other state of a module is not copied
                values[name] = value.detach().clone()
        action = site.spec.action
        before = _requires_grad(module)
        try:
            action.build(site)(module)
        except (UserCodeError, ValueError) as error:
            raise HookError(f"{site.where}: {error}") from error
        site.fired += 1
        after = _requires_grad(module)
        added = sorted(after.keys() - before.keys() - {action.adds(site.hook_name)})
        if added:
            raise HookError(f"{site.where}: the action adds {added[0]!r}, which none of its fields names")
        frozen = sorted(name for name, trains in before.items() if trains and not after.get(name, False))
        if frozen and action.does != "freeze":
            raise HookError(
                f'{site.where}: the action freezes {frozen[0]!r} and does not declare `does = "freeze"`; '
                "declare it, or use the action `freeze`"
            )
        now = module.state_dict(keep_vars=True) if restored else {}
        with torch.no_grad():
            for name, tensor in values.items():
                now[name].copy_(tensor)


def _requires_grad(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}
