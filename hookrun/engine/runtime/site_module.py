"""The module of a site: the user's own functions there, and the parameters that they add to it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hookrun.engine.actions.base import remove_parameter, was_added
from hookrun.engine.actions.user_code import added_names
from hookrun.engine.actions.values import InlineFunction
from hookrun.engine.runtime.site_place import SitePlace
from hookrun.engine.trust.load import Trusted


class SiteModule(SitePlace):
    """What an action does with its module; the methods are described in actions/base.py.

    zeros_of: name of a parameter of the module -> its KeptZero, while an `apply` hook runs
    """

    zeros_of: Callable[[str], Any]

    def function(self, field: str) -> Trusted | InlineFunction:
        """The user's own function that the field names."""
        return self._hook.functions[field]

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the current module call: the positional ones, then the others."""
        self._require("args")
        inputs = self.current.args
        return tuple(inputs.values()) if isinstance(inputs, dict) else inputs or ()

    def register_state(self, own: Any) -> None:
        """Include the state of this object, which the action keeps between firings, in `state_dict`."""
        self._held.append(own)

    def point(self, name: str) -> nn.Module:
        return self.points[name]

    def keep_zero(self, parameter: str, choose: Callable[[Tensor], Tensor]) -> None:
        zeros = self.zeros_of(parameter)
        if self.hook_name not in zeros.chosen_by:  # another module may have the same parameter
            zeros.chosen_by.add(self.hook_name)
            zeros.free = choose(zeros.free)
            zeros.fill()
            self.register_state(zeros)

    def adopted(self, own: Callable[..., Any], *, given: bool) -> Callable[..., Any]:
        """The user's own module as a function; each call looks its tensors up in the hooked module, see `_trained`.

        Of modules that share a given object they are shared, too.
        """
        if not isinstance(own, nn.Module):
            return own
        module = self.module
        with unset_fake_temporarily():
            if given and not self.has_values:
                own = deepcopy(own)  # a trial run must leave no gradients in it
            elif self._hook.added and not given:
                own.to(self.like.device, self.like.dtype)
        every = added_names(own, self.hook_name)
        added = self._hook.added
        names = {tensor: name for tensor, name in every.items() if name in added}
        for tensor, name in names.items():
            if given and was_added(module, name):
                remove_parameter(module, name)  # the object has the present values
            self._add(name, tensor)
        links: list[tuple[dict[str, Any], str, str]] = []
        buffers: list[tuple[dict[str, Any], str, str]] = []
        for part in nn.Module.modules(own):
            for held in (part._parameters, part._buffers):
                links += [(held, leaf, names[tensor]) for leaf, tensor in held.items() if tensor in names]
            for leaf, buffer in part._buffers.items():
                if buffer in names:
                    buffers.append((part._buffers, leaf, names[buffer]))
                elif buffer is None and leaf not in part._non_persistent_buffers_set:
                    buffers.append((part._buffers, leaf, ""))

        def call(*args: Any, **kwargs: Any) -> Any:
            for held, leaf, name in links:
                held[leaf] = getattr(module, name)
            if own.training is not module.training and not (given and not links):
                own.train(module.training)
            result = own(*args, **kwargs)
            for held, leaf, name in buffers if links else ():
                if held[leaf] is not (getattr(module, name) if name else None):
                    self._replace(leaf, name, held[leaf], shared=given)
            return result

        return call

    def _replace(self, leaf: str, name: str, new: Any, *, shared: bool) -> None:
        """Give the hooked module, or all of them, what its own module has put in the place of a buffer."""
        old = getattr(self.module, name) if name else None
        if _form(new) != _form(old):
            raise ValueError(
                f"it replaces its buffer {leaf!r}, {_form(old)}, by {_form(new)}, which no saved state fits"
            )
        paths = [match.path for match in self._hook.matches] if shared else [self.path]
        for path in paths:
            self.clock.model.get_submodule(path)._buffers[name] = new


def _form(value: Any) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
