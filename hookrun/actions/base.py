"""What an action is: a frozen params model, the hook types that can carry it, and a function value -> value."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from hookrun.actions.context import HookContext
from hookrun.actions.given import GivenFunction, GivenTensor
from hookrun.actions.values import FileValue, RunValue
from hookrun.callables import is_tensor
from hookrun.errors import Problem
from hookrun.hook_types import ON_VALUES, HookType
from hookrun.trusted import Trusted

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.nn import Module, Parameter

    from hookrun.actions.keep import Keep
    from hookrun.actions.rows import TokenRows

RECORD_KEYS = ("hook", "module", "path", "action", "mode", "epoch", "step", "call")
"""The keys that every record begins with: which hook, where and when. What the action recorded stands under the others.

Two of the others have a meaning whatever the action: `ok`, the verdict of a check, and `spent`, a hook's `max_bytes`
that are used up.
"""

OF_RANK = "of_rank"
"""In runs of several processes: which of them recorded it, of its own rows."""

ABOUT = frozenset((*RECORD_KEYS, OF_RANK))
"""What says where a record is from, and nothing of what was recorded."""

Scope = Literal["tensor", "value", "together", "module"]


class Keeper(Protocol):
    """Stores a captured value.

    rows:   the places [k] in the batch of the samples that the value's rows are of; None: it is not a part of a batch
    tokens: which token each row is of, where the hook has `tokens`; an action leaves that to its site
    """

    def __call__(self, value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None: ...


class Site(Protocol):
    """One action at one module or parameter: what the runtime hands to `Action.build`."""

    @property
    def hook_name(self) -> str: ...
    @property
    def hook_type(self) -> HookType: ...
    @property
    def path(self) -> str: ...  # the module's or parameter's path
    @property
    def module(self) -> Module: ...
    @property
    def seed(self) -> int: ...  # of the hook at this module; the same in every run of the experiment
    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the module call under way. HookError where the action does not declare `reads_arguments`."""

    def constant(self, field: str) -> Callable[[Tensor], Tensor]:
        """A function that gives the value of `field` in the dtype and on the device of its argument."""

    def function(self, field: str) -> Trusted | GivenFunction:
        """The user's own function that `field` names."""

    def context(self) -> HookContext:
        """The firing under way, for a user's own function."""

    def holds(self, own: Any) -> None:
        """The action keeps this object from firing to firing: its `state_dict` goes into resumable states."""

    def trainable(self, field: str) -> Callable[[], Parameter]:
        """Gives the parameter that stands for the value of `field`: the optimizer trains it, the checkpoint holds it.

        It is asked for at each call: fully_shard puts others in the place of a module's parameters.
        """

    def generator(self, like: Tensor) -> Generator:
        """A generator of this site's own, seeded for this one draw; the global generators stay untouched.

        HookError where the action does not declare `draws`.
        """

    def drawn(self, like: Tensor, fill: Callable[[Tensor, Generator], Tensor]) -> Tensor:
        """A tensor in the form of `like`, which `fill` fills in place from the generator of this one draw.

        Where several ranks have rows of the batch, what a row is given is the same for any number of ranks.
        """

    def leaves(self, value: Any) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor, and every None, of a value with its path (empty for a bare tensor)."""

    def rebuild(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """The value with `change` applied to every member that is not a container.

        Where the action captures: a copy of the value with `change` applied to every tensor, those of caches included.
        """

    def emit(self, data: Mapping[str, Any], path: str | None = None, *, show: bool = False) -> None:
        """Append a record about the tensor at `path`, by default the one that the action was given.

        Tensors of no or one dimension in it are read later, in one go; at once with `show`, which also prints the
        record.
        """

    def keep(self) -> Keeper:
        """A function that stores a captured value. HookError where the action does not declare `captures`."""

    def chosen(self, keep: Keep) -> Callable[[Sequence[int]], Tensor]:
        """A function from the shape of a batch to the places [k] of those that are kept."""

    def judge(self, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
        """Report the verdict of a check under the policy: a boolean, and the extremes found, of no dimensions."""


_ADDED = "_hookrun_added"
"""A module's own record of the parameters that hooks added to it; it goes with deep copies and pickles."""


def add_parameter(module: Module, name: str, parameter: Parameter) -> None:
    """Register a parameter, and remember that it is not the model's own."""
    module.register_parameter(name, parameter)
    module.__dict__.setdefault(_ADDED, set()).add(name)


def was_added(module: Module, name: str) -> bool:
    """Whether a hook added the parameter, in this installation or an earlier one."""
    return name in module.__dict__.get(_ADDED, ()) and module._parameters.get(name) is not None


def remove_parameter(module: Module, name: str) -> None:
    """Take an added parameter away again."""
    delattr(module, name)
    module.__dict__[_ADDED].discard(name)
    if not module.__dict__[_ADDED]:
        del module.__dict__[_ADDED]


class Packed:
    """A saved tensor in another form, and how to get the original back.

    tensor: what autograd holds in its place; None where nothing stays in memory
    undo:   held value -> the original tensor
    """

    __slots__ = ("tensor", "undo")

    def __init__(self, tensor: Tensor | None, undo: Callable[[Tensor | None], Tensor]) -> None:
        self.tensor = tensor
        self.undo = undo


class Action(BaseModel):
    """Base of the params models. One subclass is one action; its fields are the keys a hook may have beside its own.

    The first line of a subclass's docstring stands in the reference table. What an action declares here is what the
    rest of the program may rely on. A declaration that is missing is an error as soon as the action does what it has
    not declared, never another result.

    action_name: the word after `action:`
    hook_types: those that can carry it
    observes: it never returns a new value
    scope:    what the built function sees at each firing: every floating-point `tensor` (or the target) alone; the
              `value` whole; all its tensors `together`, as a list (on optimizer hooks those of all selected
              parameters), for a list of new ones; or the `module`
    captures: it uses `Site.keep`
    draws:    it uses `Site.drawn` or `Site.generator`
    draws_by_row: it uses `Site.drawn` alone, so that several ranks give each row what one process gives it
    freezes:  its modules' parameters require no gradient afterwards
    reads_arguments: it reads `Site.args`
    computes_anew: its result is not computed element by element from the tensor that it replaces, so that its shape and
              dtype are checked at each firing, not at the first of each site alone
    own_code: it runs Python of the user's own, of which nobody knows beforehand whether a graph can hold it, or whether
              it works on tensors without data
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    action_name: ClassVar[str]
    hook_types: ClassVar[frozenset[HookType]] = ON_VALUES
    observes: ClassVar[bool] = False
    scope: ClassVar[Scope] = "tensor"
    captures: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    draws_by_row: ClassVar[bool] = False
    freezes: ClassVar[bool] = False
    reads_arguments: ClassVar[bool] = False
    computes_anew: ClassVar[bool] = False
    own_code: ClassVar[bool] = False

    @property
    def any_dtype(self) -> bool:
        """Whether it is for tensors of integers and booleans too; computing is for floating-point ones alone."""
        return False

    @property
    def pointwise(self) -> bool:
        """Whether an element of the result depends on nothing but that element: a part can be edited by itself.

        What it builds then holds nothing from firing to firing.
        """
        return False

    @abstractmethod
    def build(self, site: Site) -> Callable[[Any], Any]:
        """The function that a firing runs: value -> new value, or None to leave it.

        It may be called millions of times: resolve here whatever does not change.
        """

    def build_into(self, site: Site) -> Callable[[Tensor, Tensor], object]:
        """Where it is pointwise: a function (x, out) that writes what `build` makes of x into out, which may be x."""
        function = self.build(site)
        return lambda x, out: out.copy_(function(x))

    def unfit(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """Why the action does not fit `module` on a hook of that type, or None.

        parameters: the module's own parameter names, those included that earlier hooks will add
        """
        return None

    def carried_by(self, hook_type: HookType) -> str | None:
        """Why these parameters do not go with the hook type although the action does, or None."""
        return None

    def random_seed(self) -> int | None:
        """What its draws are seeded with; None: derived from the seed of the experiment."""
        return None

    def budget(self) -> int | None:
        """The most bytes that it may keep at all its modules together; None: any number."""
        return None

    def part_of_samples(self) -> str | None:
        """Which of the samples it keeps, for the plan; None: all of them."""
        return None

    def may_stop(self) -> bool:
        """Whether one of its records may ask for the end of the run."""
        return False

    def adds(self, hook_name: str) -> str | None:
        """The name of the parameter that the action adds to each module, or None."""
        return None

    def outside_values(self) -> dict[str, FileValue | RunValue | GivenTensor | GivenFunction]:
        """The fields whose tensors come from files or other runs, or were given as objects."""
        fields = ((field, getattr(self, field)) for field in type(self).model_fields)
        kinds = FileValue | RunValue | GivenTensor | GivenFunction
        mine = self.own_functions()
        return {field: value for field, value in fields if isinstance(value, kinds) and field not in mine}

    def own_functions(self) -> dict[str, str | GivenFunction]:
        """The fields that name functions of the user's own."""
        return {}

    def may_draw(self, functions: Collection[Trusted | GivenFunction]) -> bool:
        """Whether it may use `Site.generator`, given the functions that `own_functions` named."""
        return self.draws

    def misfit(self, function: Trusted | GivenFunction, where: str) -> list[Problem]:
        """What is wrong with a function that `own_functions` named; `where` is the key path of the hook."""
        return []

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
