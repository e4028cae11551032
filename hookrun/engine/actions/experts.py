"""Mixtures of experts: which tensors of a value name the chosen experts, told by dtype and shape.

A router chooses k experts for each token. Indices [..., k] are whole numbers, weights [..., k] have the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
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

    It is told by an attribute such as `num_experts`, by a list of modules that the module is or has as `experts`, or by
    parameters of all experts in one, [experts, in, out].
    """
    from torch.nn import ModuleList
    from torch.nn.parameter import UninitializedParameter

    for name in ("num_experts", "num_local_experts", "n_routed_experts", "n_experts"):
        count = getattr(module, name, None)
        if type(count) is int:
            return count
    experts = getattr(module, "experts", module)
    if isinstance(experts, ModuleList):
        return len(experts)
    sizes: set[int] = set()
    for each in module.parameters(recurse=False):
        if not isinstance(each, UninitializedParameter) and each.dim() == 3:
            sizes.add(each.shape[0])
    return sizes.pop() if len(sizes) == 1 else None


def chosen_experts(
    value: Any, module: Module, indices: Target | None = None, weights: Target | None = None
) -> tuple[Tensor, Tensor]:
    """The indices of the chosen experts in a value, and their weights.

    indices, weights: where they are; None: the only tensor of whole numbers [..., k], with k less than the number of
                      the module's experts, and the only one of floating-point numbers that has its shape

    Raises Absent if there are none, or if several tensors may be meant.
    """
    count = expert_count(module)
    if count is not None and indices is not None:
        count += 1  # who names them may mean a choice of all experts
    pairs: list[tuple[Tensor, Tensor]] = []
    for pair in product(_tensors(value, indices), _tensors(value, weights)):
        numbers, shares = pair
        if is_integer(numbers) and numbers.dtype.is_signed and numbers.dim() > 1:
            is_mask = count is not None and numbers.shape[-1] >= count
            if shares.is_floating_point() and shares.shape == numbers.shape and not is_mask:
                pairs.append(pair)
    if len(pairs) != 1:
        raise Absent(_not_one(value, pairs, {"indices": indices, "weights": weights}))
    return pairs[0]


def router_output(value: Any, module: Module) -> tuple[Tensor | None, Tensor, int]:
    """The scores [..., experts] of all experts, the indices [..., k] of the chosen ones, and how many there are.

    The scores are None if they are not there, or if several tensors may be meant. Raises Absent if the indices are not
    there, or if neither the module nor the scores tell how many experts there are.
    """
    indices, _ = chosen_experts(value, module)
    count = expert_count(module)
    found: list[Tensor] = []
    for tensor in _tensors(value, None):
        *tokens, size = tensor.shape or (0,)
        fits = size > indices.shape[-1] and count in (None, size)
        if fits and tensor.is_floating_point() and tokens == list(indices.shape[:-1]):
            found.append(tensor)
    if len(found) == 1:
        return found[0], indices, found[0].shape[-1]
    if count is None:
        raise Absent("how many experts there are is not known")
    return None, indices, count


def count_in(value: Any, module: Module) -> int | None:
    """How many experts there are, by the module or by the scores in its value; None: not known."""
    count = expert_count(module)
    if count is not None:
        return count
    try:
        return router_output(value, module)[2]
    except Absent:
        return None


def _tensors(value: Any, target: Target | None) -> Sequence[Tensor]:
    """The tensor at the target, or all tensors of the value."""
    from hookrun.engine.values import containers

    return list(containers.tensors(value if target is None else containers.get(value, target.keys)))


def _not_one(value: Any, pairs: Sequence[tuple[Tensor, Tensor]], targets: Mapping[str, Target | None]) -> str:
    """For an error: that there are no indices and weights in the value, or that several tensors may be meant.

    targets: key -> where the user says that they are
    """
    from hookrun.engine.values.containers import describe, path_of

    said = [_found_at(value, key, target) for key, target in targets.items() if target is not None]
    if said and not pairs:
        return (
            f"{' and '.join(said)}: expected whole numbers [tokens, k] as indices, k at most the number of experts, "
            "and floating-point numbers of the same shape as weights"
        )
    named = [f"indices: {path_of(value, one)!r}, weights: {path_of(value, other)!r}" for one, other in pairs]
    if named:
        return f"several tensors may be the indices of the chosen experts and their weights: say {' or '.join(named)}"
    return (
        f"{describe(value)} does not have the indices of the chosen experts with their weights, whole and "
        "floating-point numbers of one shape [tokens, k], k less than the number of experts: select the module that "
        "gets both (in models of transformers `**.experts`), or name them with `indices` and `weights`; a matrix with "
        "a weight for every expert is edited by action: scale, factor: 0, index: '..., [3]', and scores from which "
        "experts are chosen afterwards by action: replace, value: -.inf"
    )


def _found_at(value: Any, key: str, target: Target) -> str:
    """``indices: 'shares' is float32 [2, 3, 2]``."""
    from hookrun.engine.values import containers

    found = containers.get(value, target.keys)
    dtype = str(getattr(found, "dtype", "")).removeprefix("torch.")
    return f"{key}: {str(target)!r} is {dtype} {containers.describe(found)}".replace("  ", " ")
