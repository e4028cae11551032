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
"""The keys that every record begins with: which hook, where and when. The other keys are what the action recorded.

Two of the other keys mean the same for every action: `ok` is the result of a check, and `spent` says that a hook's
`max_bytes` are used up.
"""

OF_RANK = "of_rank"
"""In runs of several processes: the rank that made the record, from its own rows."""

ABOUT = frozenset((*RECORD_KEYS, OF_RANK))
"""The keys that say where a record comes from, not what was recorded."""

Scope = Literal["tensor", "value", "together", "module"]


class Keeper(Protocol):
    """Stores a captured value.

    rows:   [k], the position in the batch of the sample of each row; None: the value is the whole batch
    tokens: the token of each row, if the hook has `tokens`; actions leave it out, the site adds it
    """

    def __call__(self, value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None: ...


class Site(Protocol):
    """One action at one module or parameter; the runtime passes it to `Action.build`."""

    @property
    def hook_name(self) -> str: ...
    @property
    def hook_type(self) -> HookType: ...
    @property
    def path(self) -> str: ...  # the module's or parameter's path
    @property
    def module(self) -> Module: ...
    @property
    def seed(self) -> int: ...  # for the hook at this module; the same in every run of the experiment
    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the current module call.

        HookError if the action does not declare `reads_arguments`.
        """

    def constant(self, field: str) -> Callable[[Tensor], Tensor]:
        """A function that gives the value of `field` in the dtype and on the device of its argument."""

    def function(self, field: str) -> Trusted | GivenFunction:
        """The user's own function that `field` names."""

    def context(self) -> HookContext:
        """The context of the current firing, for a user's own function."""

    def holds(self, own: Any) -> None:
        """Register an object that the action keeps between firings: its `state_dict` goes into resumable states."""

    def trainable(self, field: str) -> Callable[[], Parameter]:
        """A function that returns the parameter for the value of `field`; the optimizer trains it, checkpoints save it.

        Call it at each firing, because fully_shard replaces a module's parameters.
        """

    def generator(self, like: Tensor) -> Generator:
        """A generator of this site, seeded for this draw; the global generators are not used.

        HookError if the action does not declare `draws`.
        """

    def drawn(self, like: Tensor, fill: Callable[[Tensor, Generator], Tensor]) -> Tensor:
        """A tensor like `like`, which `fill` fills in place with the generator of this draw.

        If several ranks share the batch, the numbers for a row are the same for any number of ranks.
        """

    def leaves(self, value: Any) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor, and every None, of a value with its path (empty for a bare tensor)."""

    def rebuild(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """The value with `change` applied to every member that is not a container.

        For actions that capture: a copy of the value with `change` applied to every tensor, also inside caches.
        """

    def emit(self, data: Mapping[str, Any], path: str | None = None, *, show: bool = False) -> None:
        """Append a record about the tensor at `path`, by default the one that the action was given.

        Tensors of zero or one dimension in `data` are read later, all together. With `show` they are read at once and
        the record is printed.
        """

    def keep(self) -> Keeper:
        """A function that stores a captured value. HookError if the action does not declare `captures`."""

    def chosen(self, keep: Keep) -> Callable[[Sequence[int]], Tensor]:
        """A function from the shape of a batch to the positions [k] of the samples that are kept."""

    def judge(self, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
        """Report the result of a check under the policy. ok, least, largest: [], the result and the extremes found."""


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

    The first line of a subclass's docstring goes into the reference table. The rest of the program relies on what an
    action declares here. If a declaration is missing, the action raises an error when it does what it did not declare;
    it never gives another result silently.

    action_name: the word after `action:`
    hook_types: the hook types that it can be used with
    observes: it never changes the value
    scope:    what the built function gets at each firing: `tensor`, each floating-point tensor (or the target) by
              itself; `value`, the whole value; `together`, all its tensors as a list (on optimizer hooks those of all
              selected parameters), for which it returns a list; `module`, the module
    captures: it uses `Site.keep`
    draws:    it uses `Site.drawn` or `Site.generator`
    draws_by_row: it uses `Site.drawn` only, so that a row gets the same numbers with several ranks as with one
    freezes:  its modules' parameters require no gradient afterwards
    reads_arguments: it reads `Site.args`
    computes_anew: its result is not an elementwise function of the tensor that it replaces, so shape and dtype are
              checked at each firing, not only at the first of each site
    own_code: it runs the user's own Python, which may not work inside a compiled graph or on tensors without data
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
        """Whether the action also takes integer and boolean tensors. By default it gets floating-point tensors only."""
        return False

    @property
    def pointwise(self) -> bool:
        """Whether each element of the result depends only on the same element of the input.

        Parts of a tensor can then be edited separately, and the built function keeps no state between firings.
        """
        return False

    @abstractmethod
    def build(self, site: Site) -> Callable[[Any], Any]:
        """The function that each firing calls: value -> new value, or None to keep the value.

        It may be called millions of times, so compute here whatever does not change between calls.
        """

    def build_into(self, site: Site) -> Callable[[Tensor, Tensor], object]:
        """For pointwise actions: a function (x, out) that writes the result for x into out, which may be x."""
        function = self.build(site)
        return lambda x, out: out.copy_(function(x))

    def unfit(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """Why the action does not fit `module` on a hook of that type, or None.

        parameters: names of the module's own parameters, including those that earlier hooks will add
        """
        return None

    def carried_by(self, hook_type: HookType) -> str | None:
        """Why the given parameters of the action cannot be used with the hook type, or None."""
        return None

    def random_seed(self) -> int | None:
        """The seed of its random numbers; None: derived from the seed of the experiment."""
        return None

    def budget(self) -> int | None:
        """The maximum number of bytes that it keeps, over all its modules; None: no limit."""
        return None

    def part_of_samples(self) -> str | None:
        """Text for the plan that says which samples it keeps; None: all."""
        return None

    def may_stop(self) -> bool:
        """Whether one of its records may end the run."""
        return False

    def adds(self, hook_name: str) -> str | None:
        """The name of the parameter that the action adds to each module, or None."""
        return None

    def outside_values(self) -> dict[str, FileValue | RunValue | GivenTensor | GivenFunction]:
        """The fields whose tensors come from files or other runs, or were passed as Python objects."""
        fields = ((field, getattr(self, field)) for field in type(self).model_fields)
        kinds = FileValue | RunValue | GivenTensor | GivenFunction
        mine = self.own_functions()
        return {field: value for field, value in fields if isinstance(value, kinds) and field not in mine}

    def own_functions(self) -> dict[str, str | GivenFunction]:
        """The fields that name the user's own functions."""
        return {}

    def may_draw(self, functions: Collection[Trusted | GivenFunction]) -> bool:
        """Whether it may use `Site.generator`. functions: those that `own_functions` names."""
        return self.draws

    def misfit(self, function: Trusted | GivenFunction, where: str) -> list[Problem]:
        """What is wrong with a function that `own_functions` names; `where` is the key path of the hook."""
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
