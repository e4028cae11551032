"""Reads a forward of a decoder: the residual stream after each block, and what its modules add to the stream.

Observers run after the experiment's hooks, so what a hook changes in the output of a part belongs to the part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hookrun.engine.values.containers import tensors
from hookrun.engine.values.tensors import computable, read_together
from hookrun.errors import HookrunError
from hookrun.studies.kit.observing import Observers, paths_of
from hookrun.studies.kit.passes import SumOfTwo, not_finite
from hookrun.studies.lens.places import HeadsPlace, Places

T = TypeVar("T")
EMBED = "embed"
BIAS = "bias"

_SLACK = 32
"""How far an element may be off, in machine epsilons of the sum of the magnitudes."""

Rows = tuple[Tensor, ...]
"""(sequence, column), each [N] on the model's device, of the N positions that are read."""


class Part(NamedTuple):
    """A part of the residual stream: a contribution, or the stream after a layer.

    name:  the path of the module that adds it, or after which the stream is read
    layer: the number of the block, from 0; None: before or after all blocks
    head:  the number of the attention head; None: not of a single head
    """

    name: str
    layer: int | None = None
    head: int | None = None


PartRows = tuple[Part, Tensor]
"""A part with its rows [N, D] in float32 or float64; for the stream, in the model's dtype."""


# ---- what is observed ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ObservedForward:
    """One forward at the positions that are read, each value after all hooks on it.

    inputs, outputs: module path -> rows [N, ...] of the first tensor with a row for each position
    blocks: the paths of the blocks that have run, in their order
    scores: [batch, length, vocabulary], the output of the unembedding
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    scores: Tensor | None = None

    def at(self, rows: slice) -> ObservedForward:
        """The same for some of the rows."""
        inputs = {path: tensor[rows] for path, tensor in self.inputs.items()}
        outputs = {path: tensor[rows] for path, tensor in self.outputs.items()}
        return replace(self, inputs=inputs, outputs=outputs)


class Observer:
    """Observes forwards of the model within `with observer.installation`, one for each call of `observe`.

    inside:     also observe the modules inside the blocks
    embeddings: the paths of the embeddings that are not in a block
    """

    def __init__(self, model: nn.Module, places: Places, *, inside: bool) -> None:
        self.places = places
        self._rows: Rows | None = None
        self._shape = (0, 0)
        self._seen = ObservedForward()
        in_blocks = set[int]()
        inner_paths: list[str] = []
        for block in places.blocks:
            in_blocks |= {id(module) for module in model.get_submodule(block).modules()}
            if inside:
                inner_paths += children_of(model, block)
        inner_paths += [heads.path for heads in places.heads]
        self.embeddings = [
            path for path in paths_of(model, nn.Embedding) if id(model.get_submodule(path)) not in in_blocks
        ]
        inputs = dict.fromkeys([places.blocks[0], places.final_norm, *inner_paths])
        outputs = dict.fromkeys(
            [*self.embeddings, *inner_paths, *places.blocks, places.final_norm, places.unembed]
        )
        observers = Observers(model)
        observers.see_inputs(inputs, self._entered)
        observers.see_outputs(outputs, self._left)
        self.installation = observers.installation()

    def observe(
        self, forward: Callable[[], T], rows: Rows, shape: tuple[int, int]
    ) -> tuple[T, ObservedForward]:
        """What `forward` returns for a batch of shape [batch, length], and what was observed at the positions `rows`.

        Raises HookrunError if a block, the norm or the unembedding did not run as expected.
        """
        self._rows = rows
        self._shape = shape
        self._seen = seen = ObservedForward()
        output = forward()
        self._rows = None
        places = self.places
        if seen.blocks != list(places.blocks):
            raise HookrunError(
                f"task.residual: the blocks ran as {seen.blocks[:8]}, expected {list(places.blocks)[:8]}: the lens "
                "reads decoders whose blocks run once each, in this order"
            )
        lacking = [path for path in places.blocks if path not in seen.outputs]
        if lacking or places.blocks[0] not in seen.inputs:
            batch, length = shape
            raise HookrunError(
                f"{[*lacking, places.blocks[0]][0]} does not pass a tensor [{batch}, {length}, width]: the lens reads "
                "decoders whose blocks take and return the residual stream; name the blocks with task.residual"
            )
        if seen.scores is None or places.final_norm not in seen.outputs:
            path = places.unembed if places.final_norm in seen.outputs else places.final_norm
            raise HookrunError(
                f"{path} did not return a tensor with a row for each position: name another module with "
                "task.final_norm or task.unembed"
            )
        return output, seen

    def _entered(self, path: str, value: Any) -> None:
        if (tensor := self._by_position(value)) is not None:
            self._seen.inputs[path] = tensor[self._rows]

    def _left(self, path: str, value: Any) -> None:
        seen = self._seen
        tensor = self._by_position(value)
        if path in self.places.blocks and self._rows is not None:
            seen.blocks.append(path)
        if path == self.places.unembed:
            seen.scores = tensor
        is_embedding = path in self.embeddings
        if tensor is None or (is_embedding and self.places.blocks[0] in seen.inputs):
            return  # an embedding may be used again, as an unembedding
        rows = tensor[self._rows]
        if is_embedding and path in seen.outputs:
            rows = seen.outputs[path] + rows
        seen.outputs[path] = rows

    def _by_position(self, value: Any) -> Tensor | None:
        """The first floating-point tensor [batch, length, ...] in a value, or None; None outside of `observe` too.

        It may also be [1, length, ...], or [batch * length, width], as OPT uses.
        """
        if self._rows is None:
            return None
        batch, length = self._shape
        floats = [tensor.detach() for tensor in tensors(value) if tensor.is_floating_point()]
        for tensor in floats:
            if tensor.dim() > 2 and tensor.shape[0] in (1, batch) and tensor.shape[1] == length:
                return tensor.expand(batch, *tensor.shape[1:])
        for tensor in floats:
            if tensor.dim() == 2 and len(tensor) == batch * length:
                return tensor.unflatten(0, self._shape)
        return None


def children_of(model: nn.Module, block: str) -> list[str]:
    """The paths of the modules in a block that may add to the stream; sums of two streams add nothing."""
    children = model.get_submodule(block).named_children()
    return [f"{block}.{name}" for name, child in children if not isinstance(child, SumOfTwo)]


# ---- which modules add to the stream ---------------------------------------------------------------------------


class Source(NamedTuple):
    """What adds to the residual stream: one module, or several whose outputs cannot be told apart.

    part:   its name and layer
    chain:  a module with the modules that its output goes through, such as a norm, before it is added; none: what the
            whole block adds, or all embeddings together
    factor: by which the block multiplies it
    heads:  where its heads are read; None: it is one part
    """

    part: Part
    chain: tuple[str, ...] = ()
    factor: float = 1.0
    heads: HeadsPlace | None = None


def find_sources(
    model: nn.Module, places: Places, seen: ObservedForward, embeddings: Sequence[str]
) -> list[Source]:
    """What adds to the stream, in the order of the model, from one forward without the experiment's hooks.

    Raises HookrunError if heads are to be read that no module of a block adds to the stream.
    """
    entered = seen.inputs[places.blocks[0]]
    used = [path for path in embeddings if path in seen.outputs]
    sources = [Source(Part(EMBED))]
    if used and _adds_up([seen.outputs[path] for path in used], entered):
        sources = [Source(Part(path), (path,)) for path in used]
    for layer, block in enumerate(places.blocks):
        left = seen.outputs[block]
        sources += _sources_of_block(model, layer, block, entered, seen, places.heads)
        entered = left
    return sources


def _sources_of_block(
    model: nn.Module,
    layer: int,
    block: str,
    entered: Tensor,
    seen: ObservedForward,
    heads_of_blocks: Sequence[HeadsPlace],
) -> list[Source]:
    """What a block adds to the stream that has entered it; the whole block if its parts cannot be told apart."""
    left = seen.outputs[block]
    # Granite scales contributions.
    factor = float(getattr(model.get_submodule(block), "residual_multiplier", 1.0))
    chains = _chains(model, block, seen, left.shape)
    added = [computable(seen.outputs[chain[-1]]) * factor for chain in chains]
    if not _adds_up([entered, *added], left):
        chains = []
    heads = heads_of_blocks[layer] if heads_of_blocks else None
    attention: tuple[str, ...] | None = None
    if heads is not None:
        attention = next((chain for chain in chains if any(map(heads.is_in, chain))), None)
        if attention is None:
            raise HookrunError(
                f"task.heads: {heads.summed} is not part of what {block} adds to the residual stream; "
                "task.parts=residual reads the stream itself"
            )
    if not chains:
        return [Source(Part(block, layer))]
    sources: list[Source] = []
    for chain in chains:
        name = next(path for path in reversed(chain) if _has_matrix(model, path))
        sources.append(Source(Part(name, layer), chain, factor, heads if chain == attention else None))
    return sources


def _chains(model: nn.Module, block: str, seen: ObservedForward, shape: torch.Size) -> list[tuple[str, ...]]:
    """Each module of a block with the modules that its output goes through; the longest chain to each end."""
    children = [path for path in children_of(model, block) if path in seen.outputs]
    by_last: dict[str, tuple[str, ...]] = {}
    for path in children:
        if not _has_matrix(model, path):
            continue
        chain = [path]
        while taker := _taker(seen, chain, children):
            chain.append(taker)
        last = chain[-1]
        if seen.outputs[last].shape == shape and len(chain) > len(by_last.get(last, ())):
            by_last[last] = tuple(chain)
    return list(by_last.values())


def _taker(seen: ObservedForward, chain: Sequence[str], children: Sequence[str]) -> str:
    """The module that takes the output of the last one of the chain; "" if there is none."""
    made = seen.outputs[chain[-1]]
    for path in children:
        if path not in chain and path in seen.inputs and torch.equal(seen.inputs[path], made):
            return path
    return ""


def _has_matrix(model: nn.Module, path: str) -> bool:
    """Whether the module has a matrix among its parameters, which norms do not have."""
    return any(each.dim() > 1 for each in model.get_submodule(path).parameters())


def _adds_up(parts: Sequence[Tensor], expected: Tensor) -> bool:
    """Whether the parts add up to `expected`, within `_SLACK` machine epsilons of the sum of their magnitudes."""
    if any(part.shape != expected.shape for part in parts):
        return False
    added = torch.stack([computable(part) for part in parts])
    most = _SLACK * torch.finfo(expected.dtype).eps * added.abs().sum(0).clamp_min(1e-30)
    return bool(((added.sum(0) - computable(expected)).abs() <= most).all())


# ---- parts of the stream ---------------------------------------------------------------------------------------


def residual(model: nn.Module, places: Places, seen: ObservedForward) -> Iterator[PartRows]:
    """The residual stream after the embedding and after each block."""
    yield Part(EMBED), seen.inputs[places.blocks[0]]
    for layer, block in enumerate(places.blocks):
        children = model.get_submodule(block).named_children()
        sums = [f"{block}.{name}" for name, child in children if isinstance(child, SumOfTwo)]
        yield Part(sums[-1] if sums else block, layer), seen.outputs[block]


def contributions(
    model: nn.Module, places: Places, sources: Sequence[Source], seen: ObservedForward
) -> Iterator[PartRows]:
    """The contributions of the embedding, each attention or each of its heads, and each MLP to the stream.

    If no hook changes the stream elsewhere, their sum is the input of the final norm.
    """
    streams = [seen.inputs[places.blocks[0]], *(seen.outputs[block] for block in places.blocks)]
    for source in sources:
        part = source.part
        if source.heads is not None:
            yield from _heads(model, seen, source, source.heads)
        elif source.chain:
            yield part, computable(seen.outputs[source.chain[-1]]) * source.factor
        elif part.layer is None:
            yield part, computable(streams[0])
        else:
            yield part, computable(streams[part.layer + 1]) - computable(streams[part.layer])


def _heads(model: nn.Module, seen: ObservedForward, source: Source, place: HeadsPlace) -> Iterator[PartRows]:
    """A part for each head, and one for the biases of the projection and of later norms."""
    layer = source.part.layer
    chain = source.chain
    factor = source.factor
    read = (seen.outputs if place.by_output else seen.inputs).get(place.path)
    if read is None:
        raise HookrunError(f"{place.path} was not called: name the projections with task.heads")
    each = _head_rows(model, place, read)
    constant = torch.zeros_like(each[:, 0])
    if place.bias:
        constant = computable(model.get_parameter(place.bias).detach()).expand(len(each), -1)
    first = next(number for number, path in enumerate(chain) if place.is_in(path))
    for path in chain[first + 1 :]:
        module: Any = model.get_submodule(path)
        entered = seen.inputs[path]
        made = module.forward(entered)
        if torch.equal(entered, made):  # a dropout
            continue
        linear = frozen(path, module, entered, made)  # the norm after an attention, as in Gemma 2
        each = torch.stack([linear(rows) for rows in each.unbind(1)], dim=1)
        constant = linear.whole(constant)
    for head, rows in enumerate(each.unbind(1)):
        yield Part(chain[first], layer, head), rows * factor
    if constant.any():
        yield Part(place.bias or f"{chain[first]} {BIAS}", layer), constant * factor


def _head_rows(model: nn.Module, place: HeadsPlace, read: Tensor) -> Tensor:
    """[N, heads, D]: the contribution of each head."""
    if place.by_output:
        return computable(read)
    module: Any = model.get_submodule(place.path)
    weight = computable(module.weight.detach())
    if isinstance(module, nn.Linear):  # the weight of transformers' Conv1D is already [in, out]
        weight = weight.T
    return torch.einsum(
        "nhd,hdw->nhw",
        computable(read).unflatten(-1, (place.count, -1)),
        weight.unflatten(0, (place.count, -1)),
    )


_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps")


@dataclass(frozen=True)
class FrozenNorm:
    """x -> (x - mean(x), or x without centering) * scale * weight. The caller adds `bias` once to a sum of results.

    centers: subtract the mean, as LayerNorm
    scale:   [N, 1], 1 / the standard deviation, or root mean square, of the rows on which the norm was frozen
    weight:  [D]; None: ones
    bias:    [D]; None: zeros
    """

    centers: bool
    scale: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        """The linear part, without the bias, of rows [N, D]."""
        if self.centers:
            rows = rows - rows.mean(-1, keepdim=True)
        rows = rows * self.scale
        if self.weight is not None:
            rows = rows * self.weight
        return rows

    def whole(self, rows: Tensor) -> Tensor:
        """The result of the norm for rows [N, D], with the bias."""
        rows = self(rows)
        if self.bias is not None:
            rows = rows + self.bias
        return rows


def rounding(dtype: torch.dtype, expected: Tensor) -> Tensor:
    """[N, 1]: the largest accepted difference between two computations of the rows `expected` [N, D] in this dtype.

    Models in float64 may compute norms in float32.
    """
    eps = max(torch.finfo(each).eps for each in (dtype, torch.float32))
    return 64 * eps * expected.abs().amax(-1, keepdim=True).clamp_min(1e-30)


def frozen(path: str, module: nn.Module, rows: Tensor, expected: Tensor) -> FrozenNorm:
    """The norm with the scale that it has on `rows` [N, D], for which it returned `expected` [N, D].

    Raises HookrunError if the module computes neither LayerNorm nor RMSNorm, or returned NaN or infinity.
    """
    within = rounding(rows.dtype, computable(expected))
    rows, expected = computable(rows), computable(expected)
    norms = list(_candidates(module, rows)) if rows.shape == expected.shape else []
    differences = [((norm.whole(rows) - expected).abs() / within).amax() for norm in norms]
    off = [float(difference) for difference in read_together(differences)]
    if off and min(off) <= 1:
        return norms[off.index(min(off))]
    if bad := not_finite(expected):
        raise HookrunError(
            f"{path} ({type(module).__name__}) returned {bad}, so its scale cannot be frozen; a `check` hook on the "
            "blocks finds where they begin, and task.parts=residual task.norm=applied reads the rest"
        )
    raise HookrunError(
        f"{path} ({type(module).__name__}) computes neither LayerNorm nor RMSNorm, so its scale cannot be frozen: "
        "use task.norm=applied with task.parts=residual, or name the norm with task.final_norm"
    )


def _candidates(module: nn.Module, rows: Tensor) -> Iterator[FrozenNorm]:
    """The norms that the module may compute on `rows`; none if its parameters are not those of a norm."""
    weight = _parameter(module, "weight")
    bias = _parameter(module, "bias")
    for parameter in (weight, bias):
        if parameter is not None:
            last = parameter.shape[-1:].numel()
            if parameter.numel() != last or last not in (1, rows.shape[-1]):
                return  # it has neither one value, nor one for each of the features
    mean = rows.mean(-1, keepdim=True)
    weights = (None,) if weight is None else (weight, 1 + weight)  # Gemma multiplies by 1 + weight
    for eps, weighted in product(_epsilons(module, rows.dtype), weights):
        spread = ((rows - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
        yield FrozenNorm(True, spread, weighted, bias)
        size = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
        yield FrozenNorm(False, size, weighted, bias)


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    parameter = getattr(module, name, None)
    return computable(parameter.detach()) if isinstance(parameter, Tensor) else None


def _epsilons(module: nn.Module, dtype: torch.dtype) -> tuple[float, ...]:
    """What the norm may add to the variance: what the module says, else the usual values."""
    for name in _EPS:
        value = getattr(module, name, None)
        if isinstance(value, float):
            return (value,)
    return (torch.finfo(dtype).eps, 1e-5, 1e-6)
