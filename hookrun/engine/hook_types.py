"""The hook types: when an action runs, on a module, a parameter or an optimizer step. Imports no torch.

A hook type is one `HookType` here and one installer in `runtime/hooks/`. All other code reads these records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hookrun.engine.discovery import extension_modules, taken
from hookrun.errors import nearest, spec_error


@dataclass(frozen=True, slots=True, eq=False)
class HookType:
    """A hook type. Equal only to itself; `str()` is the name that YAML uses.

    name:    the word after `hook:`
    fires:   when, for the reference table
    sees:    the value that the action gets, for the reference table
    on:      what the hook is attached to; "reading" is a module that reads one of its parameters; `select` names
             parameters unless it is "module"
    phase:   in which part of a step it fires; "installation" is once, before the model runs
    takes:   the optional keys of a hook that have a meaning for this type
    in_graph: its hooks become part of a graph of torch.compile or torch.export
    refused_by_graph: why they cannot be part of a graph, and the next step; None: they can, or run outside of it
    gradient: its value consists of gradients
    batch:    a dimension of its tensors may be the batch
    in_tuple: its value is a tuple even for a single tensor; observers see that tensor
    until_backward: what it does in the forward pass is undone in the backward pass
    like:     of an extension: the name of the hook type of hookrun whose actions it carries
    """

    name: str
    fires: str
    sees: str
    on: Literal["module", "parameter", "optimizer", "reading"]
    phase: Literal["installation", "forward", "backward", "step"]
    takes: frozenset[str] = frozenset(
        {"target", "index", "tokens", "heads", "batch_dim", "when", "when.call"}
    )
    in_graph: bool = False
    refused_by_graph: tuple[str, str] | None = None
    gradient: bool = False
    batch: bool = False
    in_tuple: bool = False
    until_backward: bool = False
    like: str = "forward"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _named, (self.name,)  # the one record: the same in every process, and after a deep copy

    @property
    def shipped(self) -> HookType:
        """Itself, or for one of an extension the hook type that it is like."""
        return self if self.name in HOOK_TYPES.shipped else HOOK_TYPES[self.like]

    @property
    def on_parameters(self) -> bool:
        """Whether `select` names parameters."""
        return self.on != "module"

    @property
    def sees_batch(self) -> bool:
        """Whether its value is computed from the rows of a batch, which are split over several ranks."""
        return self.on == "module" and self.phase != "installation"

    @property
    def needs_backward(self) -> bool:
        """Whether checking it needs a backward pass."""
        return self.phase in ("backward", "step") or self.until_backward


_ON_A_PARAMETER = frozenset({"index", "when"})
_HAS_OWN_NODES = (
    "puts autograd nodes of its own around the module, at which a graph breaks",
    "use output_grad, which a graph can hold, or run without compiling",
)

FORWARD_PRE = HookType(
    "forward_pre",
    fires="before the module's forward",
    sees="its arguments",
    on="module",
    phase="forward",
    in_graph=True,
    batch=True,
    in_tuple=True,
)
FORWARD = HookType(
    "forward",
    fires="after the module's forward",
    sees="its output",
    on="module",
    phase="forward",
    in_graph=True,
    batch=True,
)
BACKWARD_PRE = HookType(
    "backward_pre",
    fires="before the module's backward",
    sees="grad_output",
    on="module",
    phase="backward",
    refused_by_graph=_HAS_OWN_NODES,
    gradient=True,
    batch=True,
    in_tuple=True,
)
BACKWARD = HookType(
    "backward",
    fires="after the module's backward",
    sees="grad_input, observers see grad_input and grad_output",
    on="module",
    phase="backward",
    refused_by_graph=_HAS_OWN_NODES,
    gradient=True,
    batch=True,
    in_tuple=True,
)
OUTPUT_GRAD = HookType(
    "output_grad",
    fires="when the gradient of the module's output is known",
    sees="that gradient",
    on="module",
    phase="backward",
    in_graph=True,
    gradient=True,
    batch=True,
)
GRAD = HookType(
    "grad",
    fires="when a parameter's gradient is computed",
    sees="that gradient",
    on="parameter",
    phase="backward",
    takes=_ON_A_PARAMETER,
    gradient=True,
)
POST_ACCUMULATE_GRAD = HookType(
    "post_accumulate_grad",
    fires="when a parameter's gradient has been accumulated",
    sees="`parameter.grad`",
    on="parameter",
    phase="backward",
    takes=_ON_A_PARAMETER,
    gradient=True,
)
SAVED_TENSORS = HookType(
    "saved_tensors",
    fires="when autograd saves a tensor inside the module's forward",
    sees="that tensor",
    on="module",
    phase="forward",
    takes=frozenset({"index", "when", "when.call", "parameters"}),
    refused_by_graph=(
        "sees nothing: the compiler itself decides what a graph saves",
        "run it without compiling, or leave it out",
    ),
    until_backward=True,
)
WEIGHT = HookType(
    "weight",
    fires="when the module's forward reads a parameter, for that call only",
    sees="the parameter as that call reads it",
    on="reading",
    phase="forward",
    takes=frozenset({"index", "when", "when.call"}),
    in_graph=True,
)
OPTIMIZER_STEP_PRE = HookType(
    "optimizer_step_pre",
    fires="before `optimizer.step()`",
    sees="the selected parameters' gradients",
    on="optimizer",
    phase="step",
    takes=_ON_A_PARAMETER,
    gradient=True,
)
OPTIMIZER_STEP_POST = HookType(
    "optimizer_step_post",
    fires="after `optimizer.step()`",
    sees="the selected parameters",
    on="optimizer",
    phase="step",
    takes=_ON_A_PARAMETER,
)
APPLY = HookType(
    "apply",
    fires="once, at installation",
    sees="the module itself",
    on="module",
    phase="installation",
    takes=frozenset(),
)


class HookTypes(Mapping[str, HookType]):
    """Every hook type by name: those of this file in the order of the reference table, then those of extensions."""

    def __init__(self, shipped: Mapping[str, HookType]) -> None:
        self.shipped = shipped

    @cached_property
    def _all(self) -> Mapping[str, HookType]:
        """Raises SpecError for one of an extension whose name is taken, or that is like none of this file."""
        types = dict(self.shipped)
        for module in extension_modules():
            for value in vars(module).values():
                if not isinstance(value, HookType):
                    continue
                if types.setdefault(value.name, value) is not value:
                    raise taken(f"a hook type of {module.__name__}", value.name, "another hook type")
                if value.like not in self.shipped:
                    raise spec_error(
                        f"hook type {value.name} of {module.__name__}",
                        f"like={value.like!r} is not a hook type of hookrun",
                        nearest(value.like, self.shipped),
                    )
        return types

    def __getitem__(self, name: str) -> HookType:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


HOOK_TYPES = HookTypes({value.name: value for value in list(vars().values()) if isinstance(value, HookType)})

ON_VALUES = frozenset(kind for kind in HOOK_TYPES.shipped.values() if kind.phase != "installation")
"""Hook types whose value consists of tensors."""


def _named(name: str) -> HookType:
    return HOOK_TYPES[name]


OWN_KEYS = frozenset({"parameters"})
"""Keys of a hook that only some hook types have; on the others an action may have a parameter of that name."""
OF_EVERY_HOOK = frozenset({"select", "hook", "action", "when", "expect", "enabled", "priority"})
"""Keys that hooks of every type may have."""
