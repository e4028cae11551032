"""What an action is: a frozen model of its parameters, a few declarations, and a function value -> new value."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from hookrun.actions.fields import Keep, Meaning
from hookrun.actions.given import GivenFunction, GivenTensor
from hookrun.actions.site import HookSite as HookSite
from hookrun.actions.site import Keeper as Keeper
from hookrun.actions.values import FileValue, RunValue
from hookrun.hook_types import FORWARD, FORWARD_PRE, ON_VALUES, HookType
from hookrun.trust.callables import is_tensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

Edit = Callable[[Any], Any]
"""value -> new value, or None to keep the value."""

RECORD_KEYS = ("hook", "module", "path", "action", "mode", "epoch", "step", "call")
"""The keys that every record begins with: which hook, where and when. The other keys are what the action recorded.

Two of the other keys mean the same for every action: `ok` is the result of a check, and `spent` says that a hook's
`max_bytes` are used up.
"""

OF_RANK = "of_rank"
"""In runs of several processes: the rank that made the record, from its own rows."""

ABOUT = frozenset((*RECORD_KEYS, OF_RANK))
"""The keys that say where a record comes from, not what was recorded."""

_ADDED = "_hookrun_added"
"""The attribute in which a module records the parameters that hooks added; copied and pickled with the module."""


def add_parameter(module: Module, name: str, parameter: Parameter) -> None:
    """Register a parameter, and record that a hook added it."""
    module.register_parameter(name, parameter)
    module.__dict__.setdefault(_ADDED, set()).add(name)


def was_added(module: Module, name: str) -> bool:
    """Whether a hook added the parameter, in this installation or an earlier one."""
    return name in module.__dict__.get(_ADDED, ()) and module._parameters.get(name) is not None


def remove_parameter(module: Module, name: str) -> None:
    """Remove an added parameter."""
    delattr(module, name)
    module.__dict__[_ADDED].discard(name)
    if not module.__dict__[_ADDED]:
        del module.__dict__[_ADDED]


class Packed:
    """The replacement of a saved tensor, and how to get the original back.

    tensor: what autograd holds instead; None if nothing stays in memory
    undo:   held value -> the original tensor
    """

    __slots__ = ("tensor", "undo")

    def __init__(self, tensor: Tensor | None, undo: Callable[[Tensor | None], Tensor]) -> None:
        self.tensor = tensor
        self.undo = undo


class Action(BaseModel):
    """Base class of the actions. The fields of a subclass are the action's parameters: keys that a hook may have.

    The first line of a subclass's docstring goes into the reference table. What concerns a kind of parameter (a value
    from a file, a function of one's own, a seed) is known from the field's type, see `fields` and `values`. The rest is
    declared here. An action that does what it did not declare raises an error; it never gives another result silently.

    action_name: the word after `action:`
    hook_types:  the hook types that it can be used with
    observes:    it never changes the value
    scope:       what the built function gets at each firing: `tensor`, each floating-point tensor (or the target) by
                 itself; `value`, the whole value; `together`, all its tensors as a list (on optimizer hooks those of
                 all selected parameters), for which it returns a list; `module`, the module
    uses:        the members `args`, `generator`, `drawn` and `keep` of the site that it uses; for random numbers by
                 `drawn` alone a row gets the same ones with several ranks as with one
    freezes:     its modules' parameters require no gradient afterwards
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    action_name: ClassVar[str]
    hook_types: ClassVar[frozenset[HookType]] = ON_VALUES
    observes: ClassVar[bool] = False
    scope: ClassVar[Literal["tensor", "value", "together", "module"]] = "tensor"
    uses: ClassVar[Collection[str]] = ()
    freezes: ClassVar[bool] = False

    @abstractmethod
    def build(self, site: HookSite) -> Edit:
        """The function that each firing calls: value -> new value, or None to keep the value.

        It may be called millions of times, so compute here whatever does not change between calls.
        """

    @property
    def any_dtype(self) -> bool:
        """Whether the action also takes integer and boolean tensors. By default it gets floating-point tensors only."""
        return False

    def unfit(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """Why the action does not fit `module` on a hook of that type, or None.

        parameters: names of the module's own parameters, including those that earlier hooks will add
        """
        return None

    # ---- known from the declarations and from the types of the fields -------------------------------------------

    @property
    def captures(self) -> bool:
        """Whether it stores values."""
        return "keep" in self.uses

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return "drawn" in self.uses or "generator" in self.uses

    @property
    def draws_by_row(self) -> bool:
        """Whether a row gets the same random numbers with several ranks as with one."""
        return "generator" not in self.uses

    @property
    def own_code(self) -> bool:
        """Whether it runs the user's own Python, which may not work in a compiled graph or on tensors without data."""
        return bool(self._named(Meaning.OWN_FUNCTION))

    @property
    def computes_anew(self) -> bool:
        """Whether shape and dtype of the result are checked at each firing, not only at the first of each site."""
        return self.own_code or "args" in self.uses

    @property
    def trains(self) -> bool:
        """Whether its operand is a parameter that is trained."""
        return bool(self._given(Meaning.TRAINABLE))

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the user's own function."""
        return self._given(Meaning.ARGUMENTS) or {}

    def carried_by(self, hook_type: HookType) -> str | None:
        """Why the given parameters of the action cannot be used with the hook type, or None."""
        if self.trains and hook_type not in {FORWARD, FORWARD_PRE}:
            return "`trainable: true` goes with forward and forward_pre only: elsewhere no gradient reaches the bias"
        if self.part_of_samples() is not None and not hook_type.batch:
            return f"keep chooses samples, and {hook_type} sees none; for some steps use when: {{step: {{every: 10}}}}"
        return None

    def random_seed(self) -> int | None:
        """The seed of its random numbers; None: derived from the seed of the experiment."""
        seed: int | None = self._given(Meaning.SEED)
        return seed

    def budget(self) -> int | None:
        """The maximum number of bytes that it keeps, over all its modules; None: no limit."""
        limit: int | None = self._given(Meaning.BYTE_LIMIT)
        return limit

    def part_of_samples(self) -> str | None:
        """Text for the plan that says which samples it keeps; None: all."""
        return next((str(value) for _, value in self if isinstance(value, Keep)), None)

    def may_stop(self) -> bool:
        """Whether one of its records may end the run."""
        return bool(self._given(Meaning.POLICY) == "stop")

    def adds(self, hook_name: str) -> str | None:
        """The name of the parameter that the action adds to each module, or None."""
        return f"{hook_name}_bias" if self.trains else self._given(Meaning.ADDED_NAME)

    def outside_values(self) -> dict[str, FileValue | RunValue | GivenTensor | GivenFunction]:
        """The fields whose tensors come from files or other runs, or were passed as Python objects."""
        kinds, functions = FileValue | RunValue | GivenTensor | GivenFunction, self.own_functions()
        return {field: value for field, value in self if isinstance(value, kinds) and field not in functions}

    def own_functions(self) -> dict[str, str | GivenFunction]:
        """The fields that name the user's own functions."""
        return {field: getattr(self, field) for field in self._named(Meaning.OWN_FUNCTION)}

    @classmethod
    def _named(cls, meaning: Meaning) -> list[str]:
        return [name for name, field in cls.model_fields.items() if meaning in field.metadata]

    def _given(self, meaning: Meaning) -> Any:
        """The value of the field with this meaning; None if the action has none."""
        return next((getattr(self, name) for name in self._named(meaning)), None)

    def summary(self) -> str:
        """The parameters that were set, as the plan shows them: ``min=-0.01 max=0.01``."""
        shown = ((field, getattr(self, field)) for field in type(self).model_fields)
        default = {field: info.default for field, info in type(self).model_fields.items()}
        return " ".join(f"{field}={_short(value)}" for field, value in shown if value != default[field])


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        text = "[" + ", ".join(_short(item) for item in value) + "]"
        return text if len(text) <= 32 else text[:29] + "..."
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
        return text if len(text) <= 60 else text[:57] + "..."
    if is_tensor(value):
        return f"tensor{list(value.shape)}"  # type: ignore[attr-defined]
    return str(value)
