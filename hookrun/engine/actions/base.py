"""What an action is, and what it sees of the hook that fires.

An action is a frozen model of its parameters, a few declarations, and a function value -> new value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.values import (
    FileValue,
    FolderValue,
    InlineFunction,
    InlineTensor,
    OutsideValue,
    PassValue,
    Ramp,
    RunFaults,
    RunValue,
    is_by_sample,
)
from hookrun.engine.hook_types import FORWARD, FORWARD_PRE, ON_VALUES, HookType
from hookrun.engine.validation import Section
from hookrun.errors import HookError

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.nn import Module

    from hookrun.engine.actions.autoencoders import Autoencoder
    from hookrun.engine.actions.fields import Keep
    from hookrun.engine.actions.rules import Rules
    from hookrun.engine.actions.values import InlineFunction
    from hookrun.engine.trust.load import Trusted
    from hookrun.engine.values.folding import Folding
    from hookrun.engine.values.host_copies import HostCopy

Edit = Callable[[Any], Any]
"""value -> new value, or None to keep the value."""

RECORD_KEYS = ("hook", "module", "path", "action", "mode", "epoch", "step", "call")
"""The keys that every record begins with: which hook, where and when. The other keys are what the action recorded.

Three of the other keys mean the same for every action: `ok` is the result of a check, `spent` says that a hook's
`max_bytes` are used up, and `bit` says that the record is a fault: the bit of an element that was flipped.
"""

BREAKS_GRAPH = "passes values to Python at each firing, which breaks the graph"
"""Why a compiled graph cannot contain an observer, as the rest of a sentence."""

MOST_FAULTS = 200_000
"""The largest number of faults that a hook makes in a run, or each rank of it: each is a line of faults.jsonl."""

OF_RANK = "of_rank"
"""In runs of several processes: the rank that made the record, from its own rows."""

ABOUT = frozenset((*RECORD_KEYS, OF_RANK))
"""The keys that say where a record comes from, not what was recorded."""

FORMS = "(forms)"
"""The key under which the data for a record may have functions, by key: numbers that have been read -> what the record
holds of them."""

_ADDED = "_hookrun_added"
"""The attribute in which a module records the tensors that hooks added; copied and pickled with the module."""


def name_taken(module: Module, name: str, planned: Collection[str] = ()) -> str | None:
    """What has the name of a parameter that hooks would add, or None; one of an earlier installation may stay.

    planned: names of parameters that earlier hooks will add
    """
    if name in planned:
        return f"an earlier hook adds a parameter {name!r} already"
    if hasattr(module, name) and not was_added(module, name):
        return f"the module has an attribute {name!r} already"
    return None


def add_parameter(module: Module, name: str, tensor: Tensor) -> str | None:
    """Register a parameter, or another tensor as a buffer, and record that a hook added it.

    One of an earlier installation is kept. Returns why it cannot be added, or None.
    """
    from torch.nn import Parameter

    problem = name_taken(module, name) or added_otherwise(module, name, tensor.shape)
    if problem is None and not was_added(module, name):
        if isinstance(tensor, Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
        module.__dict__.setdefault(_ADDED, set()).add(name)
    return problem


def was_added(module: Module, name: str) -> bool:
    """Whether a hook added the parameter or buffer, in this installation or an earlier one."""
    return name in module.__dict__.get(_ADDED, ()) and getattr(module, name, None) is not None


def added_otherwise(module: Module, name: str, shape: Sequence[int]) -> str | None:
    """Why a tensor of this shape cannot take the place of one that an earlier installation added, or None."""
    if not was_added(module, name) or list(getattr(module, name).shape) == list(shape):
        return None
    return (
        f"parameter {name!r} was added before with shape {list(getattr(module, name).shape)}, not {list(shape)}: "
        "uninstall it or choose another name"
    )


def remove_parameter(module: Module, name: str) -> None:
    """Remove an added parameter or buffer."""
    delattr(module, name)
    module.__dict__[_ADDED].discard(name)
    if not module.__dict__[_ADDED]:
        del module.__dict__[_ADDED]


def remove_added(model: Module) -> None:
    """Remove every parameter and buffer that hooks have added to the model."""
    for module in model.modules():
        for name in tuple(module.__dict__.get(_ADDED, ())):
            remove_parameter(module, name)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The replacement of a saved tensor, and how to get the original back.

    tensor: what autograd holds instead; None if nothing stays in memory
    undo:   held value -> the original tensor
    copy:   that of an accelerator's tensor that is held; it may be under way
    """

    tensor: Tensor | None
    undo: Callable[[Tensor | None], Tensor]
    copy: HostCopy | None = None


class Action(Section):
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
    uses:        the members `args`, `generator`, `drawn`, `flipped`, `keep` and `fold` of the site that it uses; for
                 random numbers by `drawn` or `flipped` a row gets the same ones with several ranks as with one
    finds:       what it looks for in the values of its modules: it stays on those in which the trial run shows it;
                 empty: it acts on all
    otherwise:   what to do where the trial run does not show it
    does:        what else it does. `freeze`: its modules' parameters require no gradient afterwards; `skip`: its
                 module's forward is not called; `stop`: nothing after its module is computed; `pack`: a saved tensor
                 is stored in another form, whole
    """

    action_name: ClassVar[str]
    hook_types: ClassVar[frozenset[HookType]] = ON_VALUES
    observes: ClassVar[bool] = False
    scope: ClassVar[Literal["tensor", "value", "together", "module"]] = "tensor"
    uses: ClassVar[Collection[str]] = ()
    finds: ClassVar[str] = ""
    otherwise: ClassVar[str] = ""
    does: ClassVar[Literal["freeze", "skip", "stop", "pack"] | None] = None

    @abstractmethod
    def build(self, site: HookSite) -> Edit:
        """The function that each firing calls: value -> new value, or None to keep the value.

        It may be called millions of times, so compute here whatever does not change between calls.
        """

    def halves(self, site: HookSite) -> Halves | None:
        """The same as `build` gives, for an observer that a compiled graph can contain; None for any other action."""
        return None

    def taken(self, value: Any, module: Module) -> Mapping[str, Tensor] | None:
        """What a plan says of each tensor that the action looks for in a value -> the tensor; None: it takes all.

        An edit gets these only; with the scope `together` in the value's order, and it returns None for one that stays.
        Raises Absent if they are not there.
        """
        return None

    @property
    def not_in_graph(self) -> str | None:
        """Why a compiled graph cannot contain an observer, in a sentence; None: it has `halves` or captures."""
        return BREAKS_GRAPH

    @property
    def points(self) -> tuple[str, ...]:
        """The names of values within its computation that other hooks can select: ``hook:NAME.POINT``.

        Their first dimensions, such as the batch, are those of the tensor that the action is given.
        """
        return ()

    @property
    def any_dtype(self) -> bool:
        """Whether the action also takes integer and boolean tensors. By default it gets floating-point tensors only."""
        return False

    def takes_tensor(self, x: Tensor, *, alone: bool) -> bool:
        """Whether an action that observes acts on a tensor; alone: it is all that the hook sees."""
        return self.any_dtype or x.is_floating_point() or x.is_complex()

    def require_tensor(self, x: Tensor) -> None:
        """Raises Absent if the action refuses this tensor, which it does not take, where a trial run sees it alone."""

    @property
    def mixes_rows(self) -> bool:
        """Whether the result for a row of a batch depends on the other rows."""
        return self.scope == "together"

    def incompatibility(self, hook_type: HookType, module: Module, parameters: Collection[str]) -> str | None:
        """Why the action does not fit `module` on a hook of that type, or None.

        parameters: names of the module's own parameters, including those that earlier hooks will add
        """
        return None

    def count_of(self, key: str, module: Module) -> int | None:
        """How many values from 0 on the parameter `key` may take at a module; None: they cannot be counted."""
        return None

    # ---- known from the declarations and from the types of the fields -------------------------------------------

    @property
    def captures(self) -> bool:
        """Whether it stores values."""
        return "keep" in self.uses

    @property
    def acts_on_call(self) -> bool:
        """Whether it acts on the call of its module, not on a value."""
        return self.does in ("skip", "stop")

    @property
    def folds(self) -> bool:
        """Whether it accumulates over the whole run."""
        return "fold" in self.uses

    @property
    def by_label(self) -> bool:
        """Whether it needs the label of each sample."""
        return False

    @property
    def of_all_rows(self) -> bool:
        """Whether what several ranks report of their rows is together what one process reports."""
        return self.captures or self.folds

    @property
    def reports_loss(self) -> bool:
        """Whether its records are about the loss of the step, which is that of all rows."""
        return False

    @property
    def works_by_sample(self) -> bool:
        """Whether it treats each sample of a batch by itself: some are kept, or each has a value of its own."""
        of_samples = [
            value
            for value in self.outside_values().values()
            if is_by_sample(value) and isinstance(value, OutsideValue) and value.at is None
        ]
        return self.value_of(Meaning.SAMPLES) is not None or bool(of_samples)

    @property
    def by_row(self) -> bool:
        """Whether it computes numbers for each row of the first dimension, which is then the batch."""
        return False

    @property
    def by_call(self) -> bool:
        """Whether it treats each call of a module within a forward by itself."""
        return False

    @property
    def reduces(self) -> bool:
        """Whether what it stores of a tensor has another shape."""
        return False

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return not {"drawn", "generator", "flipped"}.isdisjoint(self.uses)

    @property
    def trains(self) -> bool:
        """Whether its operand is a parameter that is trained."""
        return bool(self.value_of(Meaning.TRAINABLE))

    def carried_by(self, hook_type: HookType) -> str | None:
        """Why the given parameters of the action cannot be used with the hook type, or None."""
        if self.trains and hook_type not in {FORWARD, FORWARD_PRE}:
            return "`trainable: true` goes with forward and forward_pre only: elsewhere no gradient reaches the bias"
        if self.value_of(Meaning.SAMPLES) is not None and not hook_type.batch:
            return f"keep chooses samples, and {hook_type} sees none; for some steps use when: {{step: {{every: 10}}}}"
        return None

    def adds(self, hook_name: str) -> str | None:
        """The name of the parameter that the action adds to each module, or None."""
        return f"{hook_name}_bias" if self.trains else self.value_of(Meaning.ADDED_NAME)

    def said(self, hook_type: HookType) -> Mapping[str, object]:
        """The parameters that a plan shows, by name: those that differ from their defaults."""
        fields = type(self).model_fields
        return {name: value for name, value in self if value != fields[name].default}

    def together_by(self, path: str) -> str:
        """On optimizer hooks: the parameters of which this is equal are `together`; by default all."""
        return ""

    def note_on(self, shape: str, module: str) -> str:
        """What a plan says of the hook where it sees a value of this shape; ``""``: nothing. module: its class"""
        return ""

    def outside_values(
        self,
    ) -> dict[
        str, FileValue | FolderValue | RunValue | RunFaults | PassValue | InlineTensor | InlineFunction
    ]:
        """The fields whose values come from files, runs or other hooks, or were passed as Python objects."""
        kinds = FileValue | FolderValue | RunValue | RunFaults | PassValue | InlineTensor | InlineFunction
        functions = self.own_functions()
        return {field: value for field, value in self if isinstance(value, kinds) and field not in functions}

    def ramps(self) -> dict[str, Ramp]:
        """Key -> each number that follows the clock, also the factor of a value from a file or a run."""
        factors = {f"{name}.factor": value.factor for name, value in self if isinstance(value, OutsideValue)}
        return {name: value for name, value in {**dict(self), **factors}.items() if isinstance(value, Ramp)}

    def own_functions(self) -> dict[str, str | InlineFunction]:
        """The fields that name the user's own functions, which may not work in a compiled graph or without data."""
        return self.fields_of(Meaning.OWN_FUNCTION)

    def value_of(self, meaning: Meaning) -> Any:
        """The value of the field with this meaning; None if the action has none."""
        return next(iter(self.fields_of(meaning).values()), None)

    def fields_of(self, meaning: Meaning) -> dict[str, Any]:
        """Name -> value of the fields with this meaning."""
        return {name: getattr(self, name) for name in _names_of(type(self), meaning)}


@cache
def _names_of(action: type[Action], meaning: Meaning) -> tuple[str, ...]:
    """The names of the fields with this meaning."""
    return tuple(name for name, field in action.model_fields.items() if meaning in field.metadata)


class Absent(ValueError):
    """A value does not have what an action takes from it."""


@dataclass(slots=True, eq=False)
class Measured:
    """The statistics of a tensor before they are computed: the runtime may do that for several tensors at once.

    of:  their names, if they can be computed with those of other tensors, else none
    now: (tensor, readable) -> the statistics; readable: numbers can be read from the tensor now
    """

    x: Tensor
    of: tuple[str, ...]
    now: Callable[[Tensor, bool], dict[str, Any]]


Reading = Callable[[dict[str, Any], list[float]], Iterable[dict[str, Any]]]
"""(how a record begins, the numbers of a firing in a compiled graph) -> its records."""


@dataclass(frozen=True, slots=True)
class Halves:
    """An observer in two halves, of which a compiled graph can contain the first one.

    measure: tensor -> tensors [n] float64; a function of tensors alone, which can be traced
    records: how a record begins, all numbers -> the records of a firing, when they are read
    reading: instead of it, called when a graph has run: `records` of this firing
    report:  instead of both, all numbers in one tensor -> None; called when a graph has run
    count:   shape of a tensor that has elements -> how many numbers there are; None: only the graph knows
    needs:   statistics of lanes from which the numbers of a tensor follow, see `lanes`; none: they do not
    finish:  tensors that are known by these -> their numbers: for each number a tensor [R]
    """

    measure: Callable[[Tensor], list[Tensor]]
    records: Reading | None = None
    reading: Callable[[], Reading] | None = None
    report: Callable[[Tensor], None] | None = None
    count: Callable[[Sequence[int]], int | None] = lambda shape: None
    needs: tuple[str, ...] = ()
    finish: Callable[[Any], Sequence[Tensor]] | None = None


class Keeper(Protocol):
    """Stores a captured value.

    rows:   [k], the position in the batch of the sample of each row; None: the value is the whole batch
    tokens: the token of each row, if the hook has `tokens`; actions leave it out, the site adds it
    """

    def __call__(self, value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None: ...


class ActionValues(Protocol):
    """The values of the action's own fields, as functions."""

    def operand(self, field: str) -> Callable[[Tensor], Tensor | float]:
        """A function that gives the value of `field` as an operand for its argument; the fastest form of a number.

        ValueError if it does not broadcast to the argument's shape. With a `Trainable` field that is set it is the
        trained parameter.
        """

    def number(self, field: str) -> Callable[[], float]:
        """A function that gives the number in `field` at the present step; for a number that may follow the clock."""

    def constant(self, field: str) -> Callable[[Tensor], Tensor]:
        """The same operand as a tensor in the dtype and on the device of the argument."""

    def prepared(self, field: str, prepare: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The same of `prepare(value)`, in any shape; of a value that stays the same it is computed once, in `build`.

        ValueError of `prepare` is raised when the hook fires.
        """

    def folder(self, field: str) -> tuple[Autoencoder, Callable[[Tensor], Mapping[str, Tensor]]]:
        """What was read from the folder in `field`, and a function that gives its tensors by name.

        They are in the dtype and on the device of the function's argument.
        """


class ActionDraws(Protocol):
    """Random numbers: the same ones in every run of the experiment."""

    @property
    def seed(self) -> int:
        """For the hook at this module."""

    def seed_of(self, parameter: str, seed: int | None) -> int:
        """The seed of random numbers for a parameter of the module: seed + crc32(its first name in the model).

        seed: None: derived from the experiment's seed, for the hook
        """

    def generator(self, like: Tensor) -> Generator:
        """A generator of this site, seeded for this draw; the global generators are not used."""

    def drawn(self, like: Tensor, fill: Callable[[Tensor, Generator], Tensor]) -> Tensor:
        """A tensor like `like`, which `fill` fills in place with the generator of this draw.

        If several ranks share the batch, the numbers for a row are the same for any number of ranks.
        """

    def flipped(
        self, x: Tensor, bits: Sequence[int], draw: Callable[[int, Any], Any], *, by_sample: bool
    ) -> Tensor:
        """A copy of x with flipped bits, whose flips are recorded: drawn ones, or those that the field `faults` names.

        The action is given the whole tensor, also if the hook selects a part of it.

        bits: those of an element that may be flipped
        draw: (size, NumPy generator) -> an array of different numbers below `size`, which is how many bits there are in
              the whole batch, also with several ranks, or `by_sample` in each sample

        ValueError for a tensor without data, and where a listed flip does not fit.
        """


class ActionRecords(Protocol):
    """What an action records and captures."""

    stores_rows: bool
    """What is kept is written to a run directory."""

    def emit(
        self, data: Mapping[str, Any] | Measured, path: str | None = None, *, show: bool = False
    ) -> None:
        """Append a record about the tensor at `path`, by default the one that the action was given.

        Tensors of zero or one dimension in `data` are read later, all together. With `show` they are read at once and
        the record is printed.
        """

    def check_result(self, ok: Tensor, message: str, policy: str, least: Tensor, largest: Tensor) -> None:
        """Report the result of a check under the policy. ok, least, largest: [], the result and the extremes."""

    def about_check(self) -> dict[str, Any]:
        """What a record says of the place of a check in a compiled graph, beside RECORD_KEYS."""

    def judging(self, rules: Rules) -> Callable[[Tensor], None]:
        """A function that lets rules judge numbers [R], float64, under the action's policy; to be called in `build`.

        Rules over steps judge those of each step when it ends, and their windows go into resumable states.
        """

    def keep(self) -> Keeper:
        """A function that stores a captured value."""

    def chosen(self, keep: Keep) -> Callable[[Sequence[int]], Tensor]:
        """A function from the shape of a batch to the positions [k] of the samples that are kept."""

    def rebuild(self, value: Any, change: Callable[[Tensor], Any]) -> Any:
        """A copy of a captured value with `change` applied to every tensor, also inside caches."""


class ActionModule(Protocol):
    """The hooked module, and the user's own functions there."""

    module: Module
    """It, or the one that owns the parameter."""

    reads_arguments: bool
    """On `forward` and `forward_pre` the action needs the arguments of the module call; `build` may set it."""

    reads_before: bool
    """On `optimizer_step_post` the action needs the parameter as it was before the step; `build` may set it."""

    before: Tensor | None
    """A copy of that parameter, while the hook fires."""

    def point(self, name: str) -> Module:
        """The module of one of the action's `points`: called with a tensor, it gives what hooks there make of it."""

    def function(self, field: str) -> Trusted | InlineFunction:
        """The user's own function that `field` names."""

    def context(self) -> AbstractContextManager[HookContext]:
        """The context of the current firing, for a user's own function.

        What the function has recorded in the block becomes one record at its end.
        """

    def adopted(self, own: Callable[..., Any], *, given: bool) -> Callable[..., Any]:
        """A user's own function; if it is a module, the hooked module gets its tensors, and each call uses those.

        given: the object is the user's own; False: it was made for this site, and gets the model's dtype and device
        """

    def keep_zero(self, parameter: str, choose: Callable[[Tensor], Tensor]) -> None:
        """On `apply`: set elements of a parameter of the module to 0, and keep them there until the hooks are removed.

        choose: a function of the mask that earlier hooks have left, bool, False where an element stays 0 -> the new one
        """

    def register_state(self, own: Any) -> None:
        """Register an object that the action keeps between firings: its `state_dict` goes into resumable states."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the current module call."""


class ActionFolds(Protocol):
    """What an action accumulates over the whole run, which states and the end of the run keep."""

    def register_fold(self, folding: Folding) -> None:
        """Name what `accumulate` adds to."""

    def channels(self, rows: Tensor, dim: int | None) -> tuple[int, str]:
        """Which dimension of the rows that the action is given has the channels, and how a plan says it.

        dim: the dimension of the value as the module has it; None: the one that follows from its form

        ValueError if it has no such dimension, or if it could be any of several.
        """

    def accumulate(self, values: Tensor, units: Sequence[int], places: Sequence[int], text: str) -> None:
        """Add a row for each sample, or under `tokens` for each token. ValueError for other units than before.

        values: [R, U, P], the rows that the action is given, in their order
        units, places: the sizes of the dimensions of the value that U and P stand for
        text:   what a plan says of the units
        """


class HookSite(ActionValues, ActionDraws, ActionRecords, ActionModule, ActionFolds, Protocol):
    """One hook at one module or parameter, as its action sees it in `build` and in each firing.

    hook_name, hook_type: of the hook
    path:   path of the module or parameter

    Of its members, `args`, `generator`, `drawn`, `flipped` and `keep` are for actions that name them in `uses`; for
    others they raise HookError.
    """

    hook_name: str
    hook_type: HookType
    path: str


@dataclass(frozen=True, slots=True)
class HookContext:
    """The current firing of a hook, for a user's own function that takes a parameter `context`.

    hook:      the hook's name
    hook_type: when it fires: ``forward``, ``grad``, ...
    path:      path of the hooked module or parameter; empty for the model itself
    module:    the hooked module, or the module that owns the parameter
    mode:      ``train`` or ``eval``, the mode of the model
    epoch:     from 0
    step:      from 0: optimizer steps in training, batches otherwise
    call:      number of the module's call within one forward of the model, from 0, if calls are counted
    target:    the hook's `target`, the path of the tensor within the value; empty if it has none
    generator: tensor -> a generator on its device, seeded for this draw: the same numbers in every run, and when
               activation checkpointing repeats the call
    record:    (name, number) -> None: record a statistic of your own, a Python number or a tensor [], as `stats` does.
               The numbers of one call are one line of stats.jsonl. ValueError for another object, a name that is not
               letters, digits, ``_``, ``-`` and ``.``, one that every line has, or the same name twice in one call
    """

    hook: str
    hook_type: str
    path: str
    module: Module
    mode: str
    epoch: int
    step: int
    call: int
    target: str
    generator: Callable[[Tensor], Generator]
    record: Callable[[str, float | Tensor], None]
    _inputs: Any = field(default=None, repr=False)

    @property
    def inputs(self) -> Any:
        """The arguments of the module call, on `forward` and `forward_pre`.

        A tuple, ``inputs[0]`` is the first one; if some were given by name, a dict ``{0: ..., 'name': ...}``. On
        `forward_pre` they are what the function is called for, with the edits of earlier hooks, and on `forward` what
        the module's forward got. Raises HookError on other hook types.
        """
        if self._inputs is None:
            raise HookError(
                f"hook {self.hook!r} ({self.hook_type}) on {self.path or '(root)'}: context.inputs has the arguments "
                "of a module call, which only forward and forward_pre hooks see"
            )
        return self._inputs


@dataclass(frozen=True, slots=True)
class TokenRows:
    """N rows, on the CPU.

    samples:   [N] int64, the position of each row's sample in the batch
    numbers:   [N] int64, the id of that sample: as the loop gave it, else counted from 0 in the order of the calls
    positions: [N] int64, counted from the sample's first real token; on attention patterns the positions of the
               queries, or of the keys if the hook names keys only
    token_ids: [N] int64, the token at that position; -1 if it is not known
    keys:      [N] int64, the positions of the keys on attention patterns if the hook names both; else None
    """

    samples: Tensor
    numbers: Tensor
    positions: Tensor
    token_ids: Tensor
    keys: Tensor | None = None

    def at(self, rows: Tensor) -> TokenRows:
        """A part of the rows. rows: [k] int64, their indices."""
        keys = None if self.keys is None else self.keys[rows]
        return TokenRows(
            self.samples[rows], self.numbers[rows], self.positions[rows], self.token_ids[rows], keys
        )
