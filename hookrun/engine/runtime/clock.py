"""The clock that `when` reads: step, epoch and mode of a run, the calls of its modules, and the current firing."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor, is_grad_enabled, nn, stack
from torch.optim import Optimizer

from hookrun.engine.rank import own_rank
from hookrun.engine.runtime.call_stack import Calls, CallStack
from hookrun.engine.runtime.checkpointing import NO_BACKWARD, graph_task
from hookrun.engine.spec.when import When

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from hookrun.engine.runtime.tokens.calls import Pass
    from hookrun.engine.runtime.tokens.choice import Chosen
    from hookrun.engine.runtime.tokens.sequences import Sequences


class RowsOfRank(NamedTuple):
    """Which rows of a batch of `whole` rows are this rank's: `mine`."""

    mine: range
    whole: int


class Clock:
    """The position in a run. One per installation.

    step:         optimizer steps in training, batches otherwise; counts from 0
    epoch:        counts from 0
    calls:        the open calls of the model's modules, and the forwards that they make up
    accumulating: more micro-batches follow before the optimizer steps
    counting:     count the elements that edits change (on the logged steps)
    rows:         this rank's rows of the current batch; None: the batch is not split
    is_dummy_pass: this rank has no rows of the current batch and runs the pass only because collective operations need
                  every rank, or the task runs it for itself: nothing is observed, and no gradient is edited
    samples:      the sample numbers of the current batch, [B] int64; None: not known
    labels:       the labels of the current batch, [B] int64; None: not known
    matching:     hook name -> [B] bool: the samples of the current batch that meet its `when.data`; empty: not known
    population:   how many samples the run can reach, from which their numbers come; None: not known
    training_at:  the step of the training in which the steps of an evaluation are counted; None: outside of one. To be
                  set before `step`
    passes:       which tokens the calls of the model compute; None where no hook has `tokens`
    in_graphs:    tensors [] that compiled graphs read, each with a function that returns its present value
    ending:       called at the end of each step, before its number changes, and when the hooks are removed
    losses:       [1] float64 each, what was told as the loss of this step
    reads_loss:   a hook reads the loss of each step

    In a user's own loop the steps of the first optimizer that steps the model's parameters are counted, until the
    first call of `advance`; in a recorded loop without either, its forwards are (`count_batch`).
    """

    def __init__(self, model: nn.Module, scaler: GradScaler | None = None, counting: bool = False) -> None:
        self.model = model
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.in_graphs = list[tuple[Tensor, Callable[[], float]]]()
        self.ending = list[Callable[[], None]]()
        self.losses = list[Tensor]()
        self.reads_loss = False
        self._step = 0
        self._epoch = 0
        self.training_at: int | None = None
        self._counted_by_hand = False
        self._optimizer: ReferenceType[Optimizer] | None = None
        self._before_batches: int | None = None  # the step of the first forward that was counted as a batch
        self._in_batch = set[int]()  # the ids of the modules with which the forwards of this batch began
        self.calls = CallStack([], [])
        self.accumulating = False
        self.rows: RowsOfRank | None = None
        self.is_dummy_pass = False
        self.samples: Tensor | None = None
        self.labels: Tensor | None = None
        self.matching: Mapping[str, Tensor] = {}
        self.population: int | None = None
        self.passes: Sequences | None = None
        self.counting = counting

    @property
    def step(self) -> int:
        """Optimizer steps in training, batches otherwise."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self._fill()

    @property
    def ramp_step(self) -> int:
        """The step that numbers follow: an evaluation within a training does not move them."""
        return self._step if self.training_at is None else self.training_at

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch = number
        self._fill()

    def followed_in_graphs(self, like: Tensor, now: Callable[[], float]) -> Tensor:
        """A tensor like the one given, for compiled graphs to read: what `now` returns, at every step and epoch."""
        self.in_graphs.append((like, now))
        return like.fill_(now())

    def _fill(self) -> None:
        for number, now in self.in_graphs:
            number.data.fill_(now())  # graphs whose backward pass is still to come have saved the tensor

    def end_step(self) -> None:
        """What is done at the end of the step; a second call in the same step finds nothing to do."""
        for end in self.ending:
            end()
        self.losses.clear()

    @property
    def loss(self) -> Tensor | None:
        """The loss of this step, [1] float64; None: it is not known."""
        return stack(self.losses).mean(0) if self.losses else None

    def advance(self) -> None:
        """End the current step. From now on the loop ends each step by this method, and optimizers are ignored."""
        counted_already = self._optimizer is not None and not self._counted_by_hand
        self._counted_by_hand = True
        self._uncount_batches()
        if not counted_already:
            self.end_step()
            self.step += 1

    def count_batch(self, module: nn.Module) -> None:
        """A forward of a user's own loop begins with this module: of a new batch, and so step, if one did so before.

        Only where nothing else counts steps. In training mode nothing is counted if an optimizer has parameters of the
        model: it may step after several forwards.
        """
        if self._counted_by_hand or self._optimizer is not None or self.training_at is not None:
            return
        if self._before_batches is None:
            self._before_batches = self.step
        elif self.model.training and is_grad_enabled() and self._is_optimized:
            self._uncount_batches()
        elif id(module) in self._in_batch:
            self.end_step()
            self.step += 1
            self._in_batch.clear()
        self._in_batch.add(id(module))

    def _uncount_batches(self) -> None:
        if self._before_batches is not None:
            self.step = self._before_batches
        self._before_batches = None

    @cached_property
    def _is_optimized(self) -> bool:
        """Whether there is an optimizer with a parameter of the model."""
        optimizers = [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]
        of_model = _ids(self.model.parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if not of_model.isdisjoint(_ids(group["params"])):
                    return True
        return False

    def place(self, step: int) -> None:
        """Set the step. From now on the loop sets it, and optimizers are ignored."""
        self._counted_by_hand = True
        if step != self._step:
            self.end_step()
        self.step = step

    def stepped(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Count a step of these parameters, if the optimizer is the first one that stepped the model's parameters."""
        if self._counted_by_hand:
            return
        if self._optimizer is None or self._optimizer() is None:
            if _ids(parameters).isdisjoint(_ids(self.model.parameters())):
                return
            self._optimizer = ref(optimizer)
            self._uncount_batches()
        if self._optimizer() is optimizer:
            self.end_step()
            self.step += 1

    def tokens(self) -> Pass | None:
        """The pass over the tokens that the model computes now; None: not known."""
        return None if self.passes is None else self.passes.current

    @property
    def mode(self) -> str:
        """``train`` or ``eval``: the mode of the model."""
        return "train" if self.model.training else "eval"

    def state_dict(self) -> dict[str, Any]:
        """The position between two steps."""
        step = self._step + (self._before_batches is not None)  # the batch of this step has ended
        return {"step": step, "epoch": self._epoch, "by_hand": self._counted_by_hand}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._counted_by_hand = state["by_hand"]
        self.epoch = state["epoch"]
        self.step = state["step"]


def _ids(tensors: Iterable[Tensor]) -> set[int]:
    return set(map(id, tensors))


def gate(
    when: When, clock: Clock, call: Callable[[], int], draw: Callable[[], float]
) -> Callable[[], bool] | None:
    """A function that returns whether the schedule lets the hook fire now; None if it always does.

    call: returns the number of the module's call within the forward
    draw: returns a number from 0 to 1 for the current firing
    """
    if when.rank is not None and own_rank() not in when.rank:
        return lambda: False
    tests: list[Callable[[], bool]] = []
    if when.mode != "any":
        tests.append(lambda: when.holds_in(clock.model.training))
    if when.step is not None or when.epoch is not None:
        tests.append(lambda: when.holds_at(clock._step, clock._epoch))
    calls = when.call
    if calls is not None:
        tests.append(lambda: call() in calls)
    if when.probability < 1:
        tests.append(lambda: draw() < when.probability)
    if not tests:
        return None
    if len(tests) == 1:
        return tests[0]
    return lambda: all(test() for test in tests)


_CROSS_ATTENTION = re.compile(
    r"(^|\.)(EncDecAttention|encoder_attn|cross_?attention|cross_?attn)\.(.*\.)?(k|v|k_proj|v_proj|key|value)$",
    re.IGNORECASE,
)
"""Names in transformers of the modules of a decoder whose values belong to the encoder's tokens."""


class CurrentCall(local):
    """The state of the firing at a site in this thread.

    clock:   of the installation
    calls:   numbers the calls of the site's module; None: they are not numbered
    within:  path of the tensor that the hook is attached to, if a gradient hook is attached to several
    at:      path, below `within`, of the tensor that the action is given
    call_number: the number of the call that a gradient or a saved tensor belongs to; None: the module's current call
    of_pass: the pass over the tokens that a gradient belongs to; None: the current pass
    args:    the arguments of the module call as one value, for actions that use them; None: there are none
    whole:   the whole tensor while the action is given a part of it, if it needs the whole
    chosen:  the positions that `tokens` selects
    matching: [k], the rows of what the action would see for which a condition by sample holds; None: all
    in_graph: the action's numbers come from a compiled graph: nothing is read or raised before the end of the step
    """

    within = ""
    at = ""
    call_number: int | None = None
    of_pass: Pass | None = None
    args: Any = None
    whole: Tensor | None = None
    chosen: Chosen | None = None
    matching: Tensor | None = None
    in_graph = False

    def __init__(self, path: str, clock: Clock, calls: Calls | None = None) -> None:
        self.clock = clock
        self.calls = calls
        self._path_of_site = path

    @property
    def path(self) -> str:
        """The path of the tensor that the action is given, in the value that the hook gets."""
        return self.within + self.at

    def in_call(self, number: int, tokens: Pass | None, op: Callable[[Any], Any], value: Any) -> Any:
        """The op's result for a value that belongs to a call which has ended, or to one around the current call."""
        self.call_number = number
        self.of_pass = tokens
        try:
            return op(value)
        finally:
            self.call_number = self.of_pass = None

    @property
    def model_tokens(self) -> Pass | None:
        """The pass over the tokens of the model, or of its decoder; None: not known."""
        if self.of_pass is not None:
            return self.of_pass
        # recomputation by activation checkpointing
        if self.calls is not None and graph_task() != NO_BACKWARD:
            return self.calls.now.tokens
        return self.clock.tokens()

    @property
    def tokens(self) -> Pass | None:
        """The pass whose tokens the value has: for cross-attention keys and values the encoder's; None: not known."""
        of_model = self.model_tokens
        if of_model is None or of_model.encoder is None:
            return of_model
        return of_model.encoder if _CROSS_ATTENTION.search(self._path_of_site) else of_model
