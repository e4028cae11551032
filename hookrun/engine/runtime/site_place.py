"""What every part of a site knows: the hook, its place in the model, and the current firing."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.engine.actions.base import add_parameter
from hookrun.engine.hook_types import OUTPUT_GRAD
from hookrun.engine.plan.batch import BatchDims
from hookrun.engine.plan.plan import PlannedHook
from hookrun.engine.runtime.call_stack import Calls
from hookrun.engine.runtime.clock import Clock, CurrentCall
from hookrun.engine.runtime.part import TensorPart, part_of
from hookrun.engine.runtime.sinks import Sink
from hookrun.errors import HookError


class SitePlace:
    """One hook at one module or parameter.

    sink:       where records and captures go
    current:    the state of the firing in each thread
    counts_calls: calls are not followed; their numbers are those of the firings of a forward, or for `output_grad` of
                what `number_call` has counted
    part:       the part of a tensor that the action acts on; None: all of it
    before:     the parameter before the optimizer's step number `before_at`, if the action reads that
    target_keys: where the target is in the value that the hook gets; None: the value itself
    points:     the modules of the action's points, by name
    """

    fired: int

    def __init__(
        self,
        hook: PlannedHook,
        path: str,
        module: nn.Module,
        clock: Clock,
        sink: Sink,
        seed: int,
        calls: Calls | None = None,
        current: CurrentCall | None = None,
    ) -> None:
        self.spec = hook.spec
        self.hook_name = hook.spec.name
        self.hook_type = hook.spec.hook_type
        self.path = path
        self.module = module
        self.clock = clock
        self.sink = sink
        self.calls = calls
        self.counts_calls = False
        self.current = CurrentCall(path, clock, calls) if current is None else current
        # output_grad is attached to the target itself
        target = None if self.hook_type is OUTPUT_GRAD else hook.spec.keys.target
        self.target_keys = None if target is None else target.keys
        self._hook = hook
        self._given_seed = seed
        self._values: dict[str, Any] = {}
        for field, values in hook.values.items():
            if path in values:
                self._values[field] = values[path]
        self.stores_rows = sink.stores_rows
        self.points: dict[str, nn.Module] = {}
        self.reads_arguments = "args" in hook.spec.action.uses
        self.reads_before = False
        self.before: Tensor | None = None
        self.before_at = 0
        self._held: list[Any] = []
        self.part: TensorPart | None = None
        if self.spec.acts_on_part:
            self.part = part_of(hook, path, self.current, self.batch, once=self.spec.action.observes)

    @property
    def has_values(self) -> bool:
        """Tensors hold real values, which may be read; False in a trial run."""
        return self.sink.has_values

    @property
    def tokenizer(self) -> Any:
        """The tokenizer for the text of tokens; None: not known."""
        return self._hook.tokenizer

    @cached_property
    def class_name(self) -> str:
        """The class of the module, for records."""
        return self._hook.class_at(self.path) or type(self.module).__name__

    @cached_property
    def batch(self) -> BatchDims:
        """Which dimension of the tensors is the batch."""
        return self._hook.batch_of(self.path)

    @cached_property
    def captured(self) -> BatchDims:
        """The same of what it captures."""
        return self._hook.captured_of(self.path)

    @cached_property
    def where(self) -> str:
        """Hook and place for messages: ``hook 'clip_fc' (grad, clamp) on fc.weight``."""
        what = f"{self.hook_type}, {self.spec.action.action_name}"
        return f"hook {self.hook_name!r} ({what}) on {self.path or '(root)'}"

    def _require(self, member: str) -> None:
        """Raise HookError if the action uses a member of the site that it does not declare."""
        if member not in self.spec.action.uses:
            raise HookError(f"{self.where}: the action uses `{member}` of its site: name it in `uses`")

    @property
    def call(self) -> int:
        """The number of the module's call within the forward pass, from 0; a gradient has the number of its call."""
        call_number = self.current.call_number
        if call_number is not None:
            return call_number
        if self.calls is not None:
            return self.calls.now.number
        around = self.clock.calls.innermost
        if not self.counts_calls or around is None:  # with none around it, the module's call begins a forward
            return 0
        before = self.fired - 1
        return before - around.forward.fired_before.get(self, before)

    def number_call(self) -> int:
        """The number of the call that ends now, for `output_grad` where calls are not followed; else 0."""
        if not self.counts_calls or self.calls is None:
            return 0
        around = self.clock.calls.innermost
        # with none around it, the module's call is a forward of its own
        counted = Counter[Calls]() if around is None else around.forward.numbers
        return self.calls.begin(counted).number

    @property
    def like(self) -> Tensor:
        """A parameter of the module or else the model, whose dtype and device the module's values most likely have."""
        parameters = chain(self.module.parameters(), self.clock.model.parameters())
        return next(
            (each for each in parameters if each.is_floating_point() and not each.is_meta), torch.empty(0)
        )

    def _add(self, name: str, tensor: Tensor) -> None:
        if (problem := add_parameter(self.module, name, tensor)) is not None:
            raise HookError(f"{self.where}: {problem}")
