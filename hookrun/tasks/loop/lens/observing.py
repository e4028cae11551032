"""Observes a forward of a decoder: the residual stream before and after each block, and what its modules add to it.

Each value is recorded before and after the experiment's hooks on it, to separate their edits from the model's own
computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.containers import tensors
from hookrun.errors import HookrunError
from hookrun.models.decoder import SumOfTwo
from hookrun.tasks.loop.lens.places import HeadsPlace, Places

Rows = tuple[Tensor, Tensor]
"""(sequence, column), each [N] on the model's device, of the N positions that are read."""


@dataclass(eq=False)
class ObservedCall:
    """One call of a module inside a block; rows are [N, D], one for each position that is read.

    before, after: rows of its output, before and after hooks
    entered:       rows of its input, after hooks
    inputs:        all tensors among its arguments
    output:        its output tensor, after hooks
    """

    path: str
    module: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    entered: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    output: Tensor | None = None

    @property
    def edited(self) -> bool:
        """Whether hooks changed the output."""
        return self.before is not None and self.after is not None and not torch.equal(self.before, self.after)


@dataclass(eq=False)
class ObservedHeads:
    """The heads of one block's attention.

    read:          [N, heads * width of a head], the projection's input; or [N, heads, D], the heads' contributions
    before, after: [N, D], the sum of the heads' contributions and the bias, before and after hooks
    """

    read: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None


@dataclass(eq=False)
class ObservedBlock:
    """What was observed in one block; streams are [N, D].

    entered_before, entered: the residual stream at its input, before and after hooks
    left_before, left:       the stream that it returned, before and after hooks
    added:                   chains of calls; the result of the last call of each is added to the stream
    sum_calls:                  calls of modules that only compute the sum
    """

    path: str
    entered_before: Tensor
    entered: Tensor
    added: list[list[ObservedCall]] = field(default_factory=list)
    sum_calls: list[ObservedCall] = field(default_factory=list)
    left_before: Tensor | None = None
    left: Tensor | None = None
    heads: ObservedHeads | None = None


@dataclass(eq=False)
class ObservedForward:
    """What was observed in one forward.

    embedded:     path -> [N, D], the output of each embedding outside the blocks
    norm:         the call of the final norm
    norm_entered_before:     [N, D], the norm's input before hooks
    unembed_entered_before:  [N, D], the unembedding's input before hooks
    unembed_entered:         [N, D], the unembedding's input after hooks
    scores:       the output of the unembedding, before hooks on it, [batch, length, vocabulary]
    scores_after: the same, after hooks
    logits:       the output of the model, before hooks on the model itself
    """

    blocks: list[ObservedBlock] = field(default_factory=list)
    embedded: dict[str, Tensor] = field(default_factory=dict)
    norm: ObservedCall | None = None
    norm_entered_before: Tensor | None = None
    unembed_entered_before: Tensor | None = None
    unembed_entered: Tensor | None = None
    scores: Tensor | None = None
    scores_after: Tensor | None = None
    logits: Tensor | None = None


class Observer:
    """Observes the model within a `with` block: call `begin` before each forward, `end` after it.

    inside: also observe the modules inside the blocks
    """

    def __init__(self, model: nn.Module, places: Places, *, inside: bool) -> None:
        self._model, self._places, self._inside = model, places, inside
        self._stack = ExitStack()
        self._rows: Rows | None = None
        self._shape = (0, 0)
        self._known = dict[int, tuple[Tensor, int, Tensor]]()
        self._open: ObservedBlock | None = None
        self._calls = list[ObservedCall]()
        self.seen = ObservedForward()

    def begin(self, rows: Rows, shape: tuple[int, int]) -> None:
        """Prepare for a forward of a batch of shape [batch, length], to be observed at the positions `rows`."""
        self._rows, self._shape = rows, shape
        self._open, self._calls, self.seen = None, [], ObservedForward()
        self._known.clear()

    def end(self) -> ObservedForward:
        """What was observed. HookrunError if a block, the norm or the unembedding did not run as expected."""
        seen, self.seen, self._rows = self.seen, ObservedForward(), None
        self._known.clear()
        places = self._places
        found = [each.path for each in seen.blocks]
        if found != list(places.blocks):
            raise HookrunError(
                f"task.residual: the blocks ran as {found[:8]}, expected {list(places.blocks)[:8]}: the lens reads "
                "decoders whose blocks run once each, in this order"
            )
        if (
            seen.norm is None
            or seen.norm.before is None
            or seen.unembed_entered is None
            or seen.logits is None
        ):
            lacking = places.final_norm if seen.norm is None or seen.norm.before is None else places.unembed
            raise HookrunError(
                f"{lacking} did not return a tensor with a row for each position: name another module with "
                "task.final_norm or task.unembed"
            )
        return seen

    # ---- registration ------------------------------------------------------------------------------------------

    def __enter__(self) -> Observer:
        inner = set[int]()
        for number, path in enumerate(self._places.blocks):
            block = self._model.get_submodule(path)
            inner |= {id(each) for each in block.modules()}
            place = self._places.heads[number] if self._places.heads else None
            self._observe_block(path, block, place)
        for path, module in self._model.named_modules():
            if isinstance(module, nn.Embedding) and id(module) not in inner:
                self._after(module, lambda value, path=path: self._embed(path, value))
        self._observe_end()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _observe_block(self, path: str, block: nn.Module, heads: HeadsPlace | None) -> None:
        self._entering(block, lambda args: self._enter_block(path, args), first=True)
        self._entering(block, self._entered_block)
        for name, child in block.named_children():
            if self._inside or isinstance(child, SumOfTwo):
                self._observe_call(f"{path}.{name}", child)
        self._after(block, self._leave_block_before, first=True)
        self._after(block, self._leave_block)
        if heads is not None:
            reader, summed = (self._model.get_submodule(each) for each in (heads.path, heads.summed))
            if heads.by_output:
                self._after(reader, self._read_heads)
            else:
                self._entering(reader, self._read_heads)
            self._after(summed, lambda value: self._summed(value, "before"), first=True)
            self._after(summed, lambda value: self._summed(value, "after"))

    def _observe_call(self, path: str, module: nn.Module) -> None:
        self._entering(module, lambda args: self._begin_call(path, module, args), first=True)
        self._entering(module, self._entered_call)
        self._after(module, lambda value: self._end_call(module, value, "before"), first=True)
        self._after(module, lambda value: self._end_call(module, value, "after"))

    def _observe_end(self) -> None:
        norm, unembed = (
            self._model.get_submodule(each) for each in (self._places.final_norm, self._places.unembed)
        )
        self._entering(norm, lambda args: self._enter_norm(norm, args), first=True)
        self._entering(norm, self._entered_norm)
        self._after(norm, lambda value: self._leave_norm(value, "before"), first=True)
        self._after(norm, lambda value: self._leave_norm(value, "after"))
        self._entering(unembed, lambda args: self._enter_unembed(args, "unembed_entered_before"), first=True)
        self._entering(unembed, lambda args: self._enter_unembed(args, "unembed_entered"))
        self._after(unembed, lambda value: self._leave_unembed(value, "scores"), first=True)
        self._after(unembed, lambda value: self._leave_unembed(value, "scores_after"))
        self._after(self._model, lambda value: self._leave_unembed(value, "logits"), first=True)

    def _entering(self, module: nn.Module, see: Any, *, first: bool = False) -> None:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if self._rows is not None:
                see((args, kwargs))

        handle = module.register_forward_pre_hook(note, prepend=first, with_kwargs=True)
        self._stack.callback(handle.remove)

    def _after(self, module: nn.Module, see: Any, *, first: bool = False) -> None:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if self._rows is not None:
                see(output)

        handle = module.register_forward_hook(note, prepend=first)
        self._stack.callback(handle.remove)

    # ---- what is seen ------------------------------------------------------------------------------------------

    def _tensor(self, value: Any) -> Tensor | None:
        """The first floating-point tensor [batch, length, ...] in a value; None if there is none."""
        for tensor in tensors(value):
            fits = (
                tensor.dim() > 2
                and tensor.shape[0] in (1, self._shape[0])
                and tensor.shape[1] == self._shape[1]
            )
            if fits and tensor.is_floating_point():
                return tensor
        return None

    def _flat(self, value: Any) -> Tensor | None:
        """The first floating-point tensor [batch * length, width] in a value, as OPT uses; None if there is none."""
        count = self._shape[0] * self._shape[1]
        flat = (each for each in tensors(value) if each.dim() == 2 and each.is_floating_point())
        return next((each for each in flat if len(each) == count), None)

    def _picked(self, value: Any) -> tuple[Tensor, Tensor] | None:
        """The first such tensor in a value, and its rows [N, ...], copied once for each version of the tensor."""
        tensor = self._tensor(value)
        tensor = self._flat(value) if tensor is None else tensor
        if tensor is None or self._rows is None:
            return None
        counted = not tensor.is_inference()  # torch counts no versions there
        known = self._known.get(id(tensor))
        if counted and known is not None and known[0] is tensor and known[1] == tensor._version:
            return tensor, known[2]
        sequences, columns = self._rows
        by_row = tensor.detach() if tensor.dim() > 2 else tensor.detach().unflatten(0, self._shape)
        rows = by_row[sequences if len(by_row) == self._shape[0] else 0, columns]
        if counted:
            self._known[id(tensor)] = (tensor, tensor._version, rows)
        return tensor, rows

    def _stream(self, value: Any, path: str) -> Tensor:
        found = self._picked(value)
        if found is None:
            raise HookrunError(
                f"{path} does not pass a tensor [{self._shape[0]}, {self._shape[1]}, width]: the lens reads decoders "
                "whose blocks take and return the residual stream; name the blocks with task.residual"
            )
        return found[1]

    def _embed(self, path: str, value: Any) -> None:
        found = self._picked(value)
        if found is not None and not self.seen.blocks and self._open is None:
            earlier = self.seen.embedded.get(path)
            self.seen.embedded[path] = found[1] if earlier is None else earlier + found[1]

    def _enter_block(self, path: str, args: Any) -> None:
        rows = self._stream(args, path)
        self._open, self._calls = ObservedBlock(path, rows, rows), []

    def _entered_block(self, args: Any) -> None:
        if self._open is not None:
            self._open.entered = self._stream(args, self._open.path)

    def _begin_call(self, path: str, module: nn.Module, args: Any) -> None:
        if self._open is not None:
            self._calls.append(ObservedCall(path, module, list(tensors(args))))

    def _entered_call(self, args: Any) -> None:
        if self._open is not None and self._calls and (found := self._picked(args)) is not None:
            self._calls[-1].entered = found[1]

    def _end_call(self, module: nn.Module, value: Any, when: str) -> None:
        call = next((each for each in reversed(self._calls) if each.module is module), None)
        found = None if self._open is None else self._picked(value)
        if call is None or found is None:
            return
        setattr(call, when, found[1])
        call.output = found[0]

    def _read_heads(self, value: Any) -> None:
        if self._open is not None and (found := self._picked(value)) is not None:
            self._open.heads = self._open.heads or ObservedHeads()
            self._open.heads.read = found[1]

    def _summed(self, value: Any, when: str) -> None:
        if (
            self._open is not None
            and self._open.heads is not None
            and (found := self._picked(value)) is not None
        ):
            setattr(self._open.heads, when, found[1])

    def _leave_block_before(self, value: Any) -> None:
        if self._open is not None:
            self._open.left_before = self._stream(value, self._open.path)

    def _leave_block(self, value: Any) -> None:
        block = self._open
        if block is None:
            return
        block.left = self._stream(value, block.path)
        block.sum_calls = [call for call in self._calls if isinstance(call.module, SumOfTwo)]
        block.added = _chains(
            [call for call in self._calls if not isinstance(call.module, SumOfTwo)], block.left.shape
        )
        self._forget(block)
        self.seen.blocks.append(block)

    def _forget(self, block: ObservedBlock) -> None:
        """Release what is not needed anymore: the model's tensors, and rows of calls inside of chains."""
        last = {id(chain[-1]) for chain in block.added} | {id(sum_call) for sum_call in block.sum_calls}
        for call in self._calls:
            call.inputs, call.output = [], None
            if block.heads is None and id(call) not in last:
                call.entered = call.before = call.after = None
        self._known.clear()
        self._open, self._calls = None, []

    def _enter_norm(self, norm: nn.Module, args: Any) -> None:
        if len(self.seen.blocks) == len(self._places.blocks):
            self.seen.norm = ObservedCall(self._places.final_norm, norm)
            self.seen.norm_entered_before = self._stream(args, self._places.final_norm)

    def _entered_norm(self, args: Any) -> None:
        if self.seen.norm is not None:
            self.seen.norm.entered = self._stream(args, self._places.final_norm)

    def _leave_norm(self, value: Any, when: str) -> None:
        if self.seen.norm is not None:
            setattr(self.seen.norm, when, self._stream(value, self._places.final_norm))

    def _enter_unembed(self, args: Any, when: str) -> None:
        if self.seen.norm is not None:
            setattr(self.seen, when, self._stream(args, self._places.unembed))

    def _leave_unembed(self, value: Any, when: str) -> None:
        if self.seen.norm is not None:
            setattr(self.seen, when, self._tensor(value))


def _chains(calls: Sequence[ObservedCall], shape: torch.Size) -> list[list[ObservedCall]]:
    """For each call whose result no other call takes: this call and, before it, the calls that led to its input."""
    made = [call for call in calls if call.output is not None and call.after is not None]
    last = [
        call
        for call in made
        if call.after is not None
        and call.after.shape == shape
        and not any(_same(call.output, each) for other in calls if other is not call for each in other.inputs)
    ]
    chains = []
    for call in last:
        chain = [call]
        while (before := _given_by(chain[0], made)) is not None and all(before is not each for each in chain):
            chain.insert(0, before)
        chains.append(chain)
    return chains


def _given_by(call: ObservedCall, calls: Sequence[ObservedCall]) -> ObservedCall | None:
    """The call whose result is an input of this call."""
    return next(
        (each for each in calls if each is not call and any(_same(each.output, one) for one in call.inputs)),
        None,
    )


def _same(made: Tensor | None, given: Tensor) -> bool:
    """Whether both are the same tensor, or views of all of its elements."""
    if made is None or made is given:
        return made is given
    return made.numel() == given.numel() and made.data_ptr() == given.data_ptr() and made.dtype == given.dtype
