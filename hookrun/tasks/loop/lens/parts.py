"""The parts of an observed forward: the residual stream after each layer, or the contribution of each layer or head.

Contributions are checked: if those of a layer do not add up to its output, the run fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from hookrun.errors import HookrunError
from hookrun.tasks.loop.lens.norms import FrozenNorm, frozen, step, wide
from hookrun.tasks.loop.lens.observing import ObservedBlock, ObservedCall, ObservedForward
from hookrun.tasks.loop.lens.places import HeadsPlace, Places

EMBED = "embed"
BIAS = "bias"
HOOKS = "(hooks)"
"""Follows the path of a block in the name of the part that is the change of its stream by the experiment's hooks."""

_SLACK = 32
"""How far an element may be off, in machine epsilons of the sum of the magnitudes."""


@dataclass(frozen=True)
class StreamPart:
    """A part of the residual stream: a contribution, or the stream after a layer.

    name:  the path of the module that adds it, or after which the stream is read
    layer: the number of the block, from 0; None: before or after all blocks
    head:  the number of the attention head; None: not of a single head
    rows:  [N, D] in float32 or float64; for the stream, in the model's dtype
    after: it is added after the final norm
    """

    name: str
    layer: int | None
    head: int | None
    rows: Tensor
    after: bool = False


def residual(model: nn.Module, places: Places, seen: ObservedForward) -> Iterator[StreamPart]:
    """The residual stream after the embedding and after each block."""
    yield StreamPart(EMBED, None, None, seen.blocks[0].entered)
    for layer, block in enumerate(seen.blocks):
        name = block.sum_calls[-1].path if block.sum_calls else block.path
        assert block.left is not None
        yield StreamPart(name, layer, None, block.left)


def contributions(
    model: nn.Module, places: Places, seen: ObservedForward, *, by_head: bool
) -> Iterator[StreamPart]:
    """The contributions of the embedding, each attention or each of its heads, each MLP and the hooks to the stream.

    Their sum is the input of the final norm. Raises HookrunError if those of a block do not add up to its output.
    """
    yield from _embedding(seen)
    stream = wide(seen.blocks[0].entered_before)
    for layer, block in enumerate(seen.blocks):
        before = block.entered_before
        _require_sum(f"{block.path}: its input is not the output of the block before it", [stream], before)
        yield from _of_block(model, block, layer, places.heads[layer] if by_head else None)
        assert block.left is not None
        stream = wide(block.left)
    yield from _end(places, seen, stream)


def _end(places: Places, seen: ObservedForward, stream: Tensor) -> Iterator[StreamPart]:
    """The changes that hooks make to the stream before and after the final norm."""
    norm, entered = seen.norm, seen.norm_entered_before
    assert norm is not None and norm.entered is not None and entered is not None
    assert norm.before is not None and norm.after is not None
    assert seen.unembed_entered is not None and seen.unembed_entered_before is not None
    _require_sum(f"{places.final_norm}: its input is not the output of the last block", [stream], entered)
    if (edit := wide(norm.entered) - wide(entered)).any():
        yield StreamPart(f"{places.final_norm} {HOOKS}", None, None, edit)
    between = f"{places.unembed}: its input is not the output of {places.final_norm}"
    if norm.after.shape != seen.unembed_entered_before.shape:
        raise HookrunError(
            f"{between}: another module changes it in between; name the norm with task.final_norm"
        )
    _require_sum(between, [wide(norm.after)], seen.unembed_entered_before)
    if (edit := wide(seen.unembed_entered) - wide(norm.before)).any():
        yield StreamPart(f"{places.unembed} {HOOKS}", None, None, edit, after=True)


def _embedding(seen: ObservedForward) -> Iterator[StreamPart]:
    """Each embedding, if they add up to the input of the first block; otherwise this input as one part."""
    whole, each = seen.blocks[0].entered_before, list(seen.embedded.items())
    rows = [wide(rows) for _, rows in each]
    if each and all(one.shape == whole.shape for one in rows) and _misfit(rows, whole) is None:
        for (path, _), one in zip(each, rows, strict=True):
            yield StreamPart(path, None, None, one)
    else:
        yield StreamPart(EMBED, None, None, wide(whole))


def _of_block(
    model: nn.Module, block: ObservedBlock, layer: int, heads: HeadsPlace | None
) -> Iterator[StreamPart]:
    module = model.get_submodule(block.path)
    factor = float(getattr(module, "residual_multiplier", 1.0))  # Granite scales contributions
    attention = _attention(block, heads)
    sums = [wide(block.entered)]
    for chain in block.added:
        assert chain[-1].after is not None
        rows = wide(chain[-1].after) * factor
        sums.append(rows)
        if heads is not None and chain is attention:
            yield from _heads(model, block, layer, chain, heads, factor)
        else:
            yield StreamPart(_core(chain).path, layer, None, rows)
    changes = [wide(block.entered) - wide(block.entered_before)]
    changes += [
        wide(sum_call.after) - wide(sum_call.before)
        for sum_call in block.sum_calls
        if sum_call.edited and sum_call.after is not None and sum_call.before is not None
    ]
    assert block.left is not None and block.left_before is not None
    names = ", ".join(_core(chain).path for chain in block.added) or "nothing"
    what = f"{block.path}: its parts ({names}) do not add up to its output"
    _require_sum(what, [*sums, *changes[1:]], block.left_before)
    changes.append(wide(block.left) - wide(block.left_before))
    change = reduce(torch.add, changes)
    if change.any():
        yield StreamPart(f"{block.path} {HOOKS}", layer, None, change)


def _core(chain: Sequence[ObservedCall]) -> ObservedCall:
    """The call that names the chain: the last one with a matrix among its parameters, which norms do not have."""
    matrices = (call for call in reversed(chain) if any(each.dim() > 1 for each in call.module.parameters()))
    return next(matrices, chain[-1])


# ---- heads -----------------------------------------------------------------------------------------------------


def _attention(block: ObservedBlock, heads: HeadsPlace | None) -> list[ObservedCall] | None:
    """The chain of calls that contains the projection of the heads."""
    if heads is None:
        return None
    for chain in block.added:
        if any(_holds(call, heads.summed) for call in chain):
            return chain
    raise HookrunError(
        f"task.heads: {heads.summed} is not part of what {block.path} adds to the residual stream"
    )


def _holds(call: ObservedCall, path: str) -> bool:
    return path == call.path or path.startswith(f"{call.path}.")


def _heads(
    model: nn.Module,
    block: ObservedBlock,
    layer: int,
    chain: list[ObservedCall],
    place: HeadsPlace,
    factor: float,
) -> Iterator[StreamPart]:
    """A part for each head, one for the biases of the projection and later norms, and one for changes by hooks."""
    seen = block.heads
    if seen is None or seen.read is None or seen.before is None or seen.after is None:
        raise HookrunError(
            f"{place.path} was not called in {block.path}: name the projections with task.heads"
        )
    path = next(call.path for call in chain if _holds(call, place.summed))
    each = _head_rows(model, place, seen.read)
    bias = model.get_parameter(place.bias).detach() if place.bias else None
    constant = torch.zeros_like(each[:, 0]) if bias is None else wide(bias).expand(len(each), -1)
    what = f"{place.path}: its heads do not add up to the output of {place.summed}"
    _require_sum(what, [*each.unbind(1), constant], seen.before, of_products=True)
    first = next(n for n, call in enumerate(chain) if _holds(call, place.summed))
    later, edited = chain[first + 1 :], not torch.equal(seen.before, seen.after) or chain[first].edited
    for call in later:
        edited = edited or call.edited
        if (linear := _linear(call)) is not None:
            each = torch.stack([linear(rows) for rows in each.unbind(1)], dim=1)
            constant = linear(constant)
            constant = constant if linear.bias is None else constant + linear.bias
    rows = [*each.unbind(1), constant]
    after = chain[-1].after
    assert after is not None
    if not edited:
        what = f"{path}: its heads do not add up to what it adds to the residual stream"
        _require_sum(what, rows, after, of_products=True)
    for head, one in enumerate(each.unbind(1)):
        yield StreamPart(path, layer, head, one * factor)
    if constant.any():
        yield StreamPart(place.bias or f"{path} {BIAS}", layer, None, constant * factor)
    if edited:
        yield StreamPart(f"{path} {HOOKS}", layer, None, (wide(after) - reduce(torch.add, rows)) * factor)


def _linear(call: ObservedCall) -> FrozenNorm | None:
    """The frozen norm after an attention, as in Gemma 2; None for a module that returns its input, such as dropout."""
    assert call.entered is not None and call.before is not None
    if torch.equal(call.entered, call.before):
        return None
    return frozen(call.path, call.module, call.entered, call.before)


def _head_rows(model: nn.Module, place: HeadsPlace, read: Tensor) -> Tensor:
    """[N, heads, D]: the contribution of each head."""
    if place.by_output:
        return wide(read)
    module: Any = model.get_submodule(place.path)
    weight = wide(module.weight.detach())
    # The weight of transformers' Conv1D is already [in, out].
    weight = weight.T if isinstance(module, nn.Linear) else weight
    width, count = weight.shape[0], place.count
    if width % count or read.shape[-1] != width:
        raise HookrunError(
            f"{place.path}: its input of {read.shape[-1]} features is not the output of {count} heads"
        )
    by_head = weight.unflatten(0, (count, -1))
    return torch.einsum("nhd,hdw->nhw", wide(read).unflatten(-1, (count, -1)), by_head)


# ---- checks ----------------------------------------------------------------------------------------------------


def _misfit(parts: Sequence[Tensor], expected: Tensor, *, of_products: bool = False) -> float | None:
    """The largest difference between the parts' sum and `expected` if it is more than rounding, otherwise None.

    The tolerance of an element is `_SLACK` machine epsilons of the sum of the parts' magnitudes.

    of_products: the parts are matrix products, whose errors depend on the largest elements of a row
    """
    total, magnitude = torch.zeros_like(parts[0]), torch.zeros_like(parts[0])
    for part in parts:
        total += part
        magnitude += part.abs()
    eps = torch.finfo(expected.dtype).eps
    if of_products:
        magnitude, eps = magnitude.amax(-1, keepdim=True), step(expected.dtype)
    off = (total - wide(expected)).abs()
    most = _SLACK * eps * magnitude.clamp_min(1e-30)
    return None if bool((off <= most).all()) else float(off.max())


def _require_sum(what: str, parts: Sequence[Tensor], expected: Tensor, *, of_products: bool = False) -> None:
    if (off := _misfit(parts, expected, of_products=of_products)) is None:
        return
    raise HookrunError(
        f"{what}: they differ by {off:.3g}. The lens cannot split this model's computation here, or a hook "
        "changes a value between its modules; task.parts=residual reads the stream itself"
    )
