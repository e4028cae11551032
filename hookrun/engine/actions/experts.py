"""Mixtures of experts: which tensors of a value name the chosen experts, told by dtype and shape.

A router chooses k experts for each token. Indices [..., k] are whole numbers, weights [..., k] have the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from hookrun.engine.values.index import Target

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")
"""Attributes of a module that say how many experts it has."""

_SELECT = "select the module that gets both (in models of transformers `**.experts`)"


def _listed_if_one(raw: Any) -> Any:
    return [raw] if isinstance(raw, int) and not isinstance(raw, bool) else raw


Experts = Annotated[
    tuple[Annotated[int, Field(strict=True, ge=0, lt=10**6)], ...],
    BeforeValidator(_listed_if_one),
    Field(min_length=1),
]
"""Numbers of experts, from 0; one number stands for a list of it."""


def expert_count(module: Module) -> int | None:
    """How many experts a module has; None: not known.

    By an attribute such as `num_experts`, by the parameters of all experts in one, [experts, in, out], or by the list of
    modules that it is.
    """
    from torch.nn import ModuleList
    from torch.nn.parameter import is_lazy

    for name in _COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    if isinstance(module, ModuleList):
        return len(module)
    sizes: set[int] = set()
    for parameter in module._parameters.values():
        if parameter is not None and not is_lazy(parameter) and parameter.dim() == 3:
            sizes.add(parameter.shape[0])
    return sizes.pop() if len(sizes) == 1 else None


def lacking(module: Module, experts: Sequence[int]) -> str | None:
    """That the module does not have one of the experts; None: it has them, or their number is not known."""
    count = expert_count(module)
    beyond = [number for number in experts if count is not None and number >= count]
    if not beyond:
        return None
    return f"there is no expert {beyond[0]}: it has {count}, numbered from 0"


def is_integer(x: Tensor) -> bool:
    """Whether its elements are whole numbers; truth values are not."""
    import torch

    return not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)


def chosen_experts(
    value: Any, indices: Target | None = None, weights: Target | None = None
) -> tuple[Tensor, Tensor]:
    """The indices of the chosen experts in a value, and their weights.

    indices, weights: where they are; None: told by dtype and shape

    Raises ValueError if there are none, or if several tensors may be meant.
    """
    pairs = list(_pairs(value, indices, weights))
    if len(pairs) == 1:
        return pairs[0]
    raise ValueError(_not_one(value, pairs))


def scores_of(value: Any, indices: Tensor, count: int | None, logits: Target | None) -> Tensor | None:
    """The scores [..., experts] of all experts, beside the indices [..., k] of the chosen ones; None: there are none.

    count:  how many experts there are; None: more than k
    logits: where the scores are; None: told by shape

    Raises ValueError if what is named has another shape, or if several tensors may be meant.
    """
    *tokens, k = indices.shape
    found: list[Tensor] = []
    for tensor in _tensors(value, logits):
        *of_tokens, size = tensor.shape or (0,)
        if tensor.is_floating_point() and of_tokens == tokens and (size == count if count else size > k):
            found.append(tensor)
    if logits is not None and not found:
        raise ValueError(f"{logits}: the scores of all experts have the shape {[*tokens, count or 'experts']}")
    if len(found) > 1:
        several = " or ".join(path_of(value, tensor) for tensor in found)
        raise ValueError(f"{several} may be the scores of all experts: name them with `logits`")
    return found[0] if found else None


def _pairs(value: Any, indices: Target | None, weights: Target | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of whole numbers with each tensor of floating-point numbers that has its shape [..., k]."""
    for numbers in _tensors(value, indices):
        if not is_integer(numbers) or numbers.dim() < 2:
            continue
        for shares in _tensors(value, weights):
            if shares.is_floating_point() and shares.shape == numbers.shape:
                yield numbers, shares


def _tensors(value: Any, target: Target | None) -> Sequence[Tensor]:
    """The tensor at the target, or all tensors of the value."""
    from hookrun.engine.values import containers

    if target is None:
        return list(containers.tensors(value))
    try:
        return list(containers.tensors(containers.get(value, target.keys)))
    except containers.TargetError as error:
        raise ValueError(f"{target}: {error}") from error


def _not_one(value: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> str:
    from hookrun.engine.values.containers import describe

    if pairs:
        several = [f"{path_of(value, numbers)} and {path_of(value, shares)}" for numbers, shares in pairs]
        return (
            f"{' or '.join(several)} may be the indices of the chosen experts and their weights: name them, as in "
            f"{_named(value, *pairs[0])}"
        )
    text = (
        "there are no indices of chosen experts beside their weights, which are whole and floating-point numbers of one "
        f"shape [tokens, k], in {describe(value)}: {_SELECT}, or name them with `indices` and `weights`"
    )
    if not any(map(is_integer, _tensors(value, None))):
        text += (
            "; a matrix with a weight for every expert is edited by action: scale, factor: 0, target: …, "
            "index: '..., [3]'"
        )
    return text


def _named(value: Any, numbers: Tensor, shares: Tensor) -> str:
    return f"indices: {path_of(value, numbers)!r}, weights: {path_of(value, shares)!r}"


def path_of(value: Any, tensor: Tensor) -> str:
    """The path of a tensor in a value."""
    from hookrun.engine.values.containers import leaves

    return next(path for path, leaf in leaves(value) if leaf is tensor)
