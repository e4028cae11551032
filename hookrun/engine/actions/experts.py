"""Mixtures of experts: which tensors of a value name the chosen experts, told by dtype and shape.

A router chooses k experts for each token. Indices [..., k] are whole numbers, weights [..., k] have the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from hookrun.engine.actions.base import Absent
from hookrun.engine.values.tensors import is_integer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from hookrun.engine.values.index import Target


def _listed_if_one(raw: Any) -> Any:
    return [raw] if type(raw) is int else raw


Experts = Annotated[
    tuple[Annotated[int, Field(strict=True, ge=0, lt=10**6)], ...],
    BeforeValidator(_listed_if_one),
    Field(min_length=1),
]
"""Numbers of experts, from 0; one number stands for a list of it."""


def expert_count(module: Module) -> int | None:
    """How many experts a module has; None: not known.

    By an attribute such as `num_experts`, or by parameters of all experts in one, [experts, in, out].
    """
    from torch.nn.parameter import is_lazy

    for name in ("num_experts", "num_local_experts", "n_routed_experts", "n_experts"):
        count = getattr(module, name, None)
        if type(count) is int:
            return count
    held = [each for each in module._parameters.values() if each is not None and not is_lazy(each)]
    sizes = {each.shape[0] for each in held if each.dim() == 3}
    return sizes.pop() if len(sizes) == 1 else None


def chosen_experts(
    value: Any, indices: Target | None = None, weights: Target | None = None
) -> tuple[Tensor, Tensor]:
    """The indices of the chosen experts in a value, and their weights.

    indices, weights: where they are; None: the only tensor of whole numbers [..., k] with the only one of
                      floating-point numbers that has its shape

    Raises Absent if there are none, or if several tensors may be meant.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for numbers in _tensors(value, indices):
        if is_integer(numbers) and numbers.dtype.is_signed and numbers.dim() > 1:
            for shares in _tensors(value, weights):
                if shares.is_floating_point() and shares.shape == numbers.shape:
                    pairs.append((numbers, shares))
    if len(pairs) != 1:
        raise Absent(_not_one(value, pairs))
    return pairs[0]


def router_output(value: Any, module: Module) -> tuple[Tensor, Tensor]:
    """The scores [..., experts] of all experts and the indices [..., k] of the chosen ones.

    Raises Absent if they are not there, or if several tensors may be meant.
    """
    indices, _ = chosen_experts(value)
    count = expert_count(module)
    found: list[Tensor] = []
    for tensor in _tensors(value, None):
        *tokens, size = tensor.shape or (0,)
        fits = size > indices.shape[-1] if count is None else size == count
        if fits and tensor.is_floating_point() and tokens == list(indices.shape[:-1]):
            found.append(tensor)
    if len(found) != 1:
        raise Absent(f"{len(found)} tensors may be the scores of all experts")
    return found[0], indices


def _tensors(value: Any, target: Target | None) -> Sequence[Tensor]:
    """The tensor at the target, or all tensors of the value."""
    from hookrun.engine.values import containers

    return list(containers.tensors(value if target is None else containers.get(value, target.keys)))


def _not_one(value: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> str:
    """For an error: that there are no indices and weights in the value, or that several tensors may be meant."""
    from hookrun.engine.values.containers import describe

    named = [f"indices: {path_of(value, one)!r}, weights: {path_of(value, other)!r}" for one, other in pairs]
    if named:
        return f"several tensors may be the indices of the chosen experts and their weights: say {' or '.join(named)}"
    return (
        f"{describe(value)} does not have the indices of the chosen experts with their weights, whole and "
        "floating-point numbers of one shape [tokens, k]: select the module that gets both (in models of transformers "
        "`**.experts`), or name them with `indices` and `weights`; a matrix with a weight for every expert is edited "
        "by action: scale, factor: 0, index: '..., [3]'"
    )


def path_of(value: Any, tensor: Tensor) -> str:
    """The path of a tensor in a value."""
    from hookrun.engine.values.containers import leaves

    return next(path for path, leaf in leaves(value) if leaf is tensor)
