"""`attention: points`: queries, keys, values, scores, pattern and z of a transformers model as outputs of modules.

transformers allows replacing the attention function of a model. hookrun's function computes the same as eager
attention, and passes each intermediate value through a child of the attention module, where hooks can access it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookrun.errors import HookrunError

NAME = "hookrun_points"
"""The name under which hookrun's function is registered in transformers."""

POINTS = ("q", "k", "v", "scores", "pattern", "z")
OUTPUT_PROJECTIONS = (
    *("c_proj", "o_proj", "out_proj", "out_lin", "o", "dense"),
    *("wo", "w_o", "out", "to_out", "proj"),
)
"""Usual names of the module of an attention whose input is the concatenated heads."""
_KNOWN = {
    *("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"),
    *("softcap", "position_bias", "sliding_window"),
}
# Sizes of the tensors with which an attention is compared.
_WIDTH = 8
_LENGTH = 5
_KEYS = 7


class Point(nn.Module):
    """An identity for a value; its own class, so that it is not confused with a model's own module."""

    def forward(self, value: Tensor) -> Tensor:
        return value


class Pattern(Point):
    """The point of the attention pattern.

    upcast: the model computes its softmax in float32, whatever its own dtype
    """

    def __init__(self, upcast: bool) -> None:
        super().__init__()
        self.upcast = upcast


class HeadwiseProjection(nn.Module):
    """An output projection that computes the part of each head separately, with the same parameters and names.

    `result` is [batch, position, head, width of the residual stream]; its sum over heads plus the bias is the output.
    """

    def __init__(self, projection: nn.Module, heads: int, result: Point) -> None:
        super().__init__()
        self.weight = projection.get_parameter("weight")
        self.bias: nn.Parameter | None
        self.register_parameter("bias", projection._parameters.get("bias"))
        self.heads = heads
        # Conv1D of transformers multiplies from the right.
        self.in_rows = not isinstance(projection, nn.Linear)
        self.result = result

    def forward(self, z: Tensor) -> Tensor:
        """[batch, position, heads * width of a head] to [batch, position, width]."""
        weight = self.weight if self.in_rows else self.weight.T
        by_head = weight.unflatten(0, (self.heads, -1))
        parts = torch.einsum("bphd,hdw->bphw", z.unflatten(-1, (self.heads, -1)), by_head)
        total: Tensor = self.result(parts).sum(-2)
        return total if self.bias is None else total + self.bias


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of queries [batch, heads, queries, width] to keys and values [batch, key heads, keys, width].

    At the points `q`, `k`, `v` and `z` a value is [batch, position, head, width], at `scores` and `pattern`
    [batch, head, query, key]. The scores are the input of the softmax: scaled, with bias and mask added.
    """
    query = _at(module, "q", query.transpose(1, 2)).transpose(1, 2)
    key = _at(module, "k", key.transpose(1, 2)).transpose(1, 2)
    value = _at(module, "v", value.transpose(1, 2)).transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key = _for_each_query_head(key, groups)
        value = _for_each_query_head(value, groups)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    scores = _at(module, "scores", scores)
    place = module._modules.get("pattern")
    upcast = isinstance(place, Pattern) and place.upcast
    pattern = F.softmax(scores, dim=-1, dtype=torch.float32 if upcast else None).to(value.dtype)
    pattern = _at(module, "pattern", pattern)
    dropped = F.dropout(pattern, p=dropout, training=module.training)
    z = torch.matmul(dropped, value).transpose(1, 2).contiguous()
    return _at(module, "z", z), dropped


def _for_each_query_head(x: Tensor, groups: int) -> Tensor:
    """[batch, key heads, keys, width] to [batch, heads, keys, width].

    As transformers does it: a single key head is not copied, and a matrix product may round differently then.
    """
    return x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _at(module: nn.Module, name: str, value: Tensor) -> Tensor:
    point = module._modules.get(name)
    if not isinstance(point, Point):  # the model's own module of that name, which has the value already
        return value
    return point(value)


def points(model: nn.Module) -> nn.Module:
    """Give a transformers model of your own the points of `model.args.attention=points`, and return it.

    Each attention module gets the children `q`, `k`, `v`, `scores`, `pattern` and `z`, where hooks can access these
    values. The model computes eager attention from now on, with the same parameters.

    model: a model of transformers, or a module with some inside

    Raises HookrunError if its attention cannot be replaced.
    """
    try:
        add_points(model)
    except ValueError as error:
        raise HookrunError(f"points: {error}") from error
    return model


def add_points(model: nn.Module) -> None:
    """Add the points to each attention module, and let transformers call hookrun's function, with the mask of eager.

    Existing children of these names are kept. Raises ValueError, with the reason, if the model has no attention that
    hookrun's function can replace.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    attentions = list(_attentions(model))
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} has no attention module whose attention function transformers can replace"
        )
    upcasts = {type(module): _upcast(module) for _, module in attentions}
    for _, module in attentions:
        for name in POINTS:
            if name not in module._modules and not hasattr(module, name):
                point = Pattern(upcasts[type(module)]) if name == "pattern" else Point()
                module.add_module(name, point)
        if not isinstance(module._modules.get("pattern"), Pattern):
            raise ValueError(f"{type(module).__name__} has another attribute called 'pattern'")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    for owner in model.modules():
        if hasattr(owner, "set_attn_implementation"):
            owner.set_attn_implementation(NAME)  # type: ignore[operator]
    for path, module in attentions:
        config: Any = module.config
        if config._attn_implementation != NAME:  # set_attn_implementation only warns of these
            raise ValueError(f"transformers does not replace the attention function of {path}")


def add_results(model: nn.Module) -> None:
    """Add to each attention module the child `result`: what each head adds, after the output projection.

    Raises ValueError if an attention module has no output projection of its own.
    """
    for path, module in list(_attentions(model)):
        name = next((projection for projection in OUTPUT_PROJECTIONS if projection in module._modules), None)
        if name is None:
            raise ValueError(f"{type(module).__name__} ({path}) has no output projection of its own")
        config: Any = module.config
        result = Point()
        module.add_module("result", result)
        projection = module.get_submodule(name)
        module.add_module(name, HeadwiseProjection(projection, config.num_attention_heads, result))


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose forward uses transformers' choice of attention function."""
    return ((path, module) for path, module in model.named_modules() if _is_attention(module))


def _is_attention(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def lacks_points(module: nn.Module) -> bool:
    """Whether `attention: points` would give this module the points."""
    return _is_attention(module) and not isinstance(module._modules.get("pattern"), Pattern)


def _upcast(module: nn.Module) -> bool:
    """Whether the model's own eager attention computes its softmax in float32.

    Raises ValueError if hookrun's function does not give the same result either way.
    """
    name = type(module).__name__
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(f"{name} has no eager attention to compare hookrun's with")
    takes = set(inspect.signature(eager).parameters)
    unknown = takes - _KNOWN
    if unknown:
        raise ValueError(
            f"the attention of {name} depends on {', '.join(sorted(unknown))}, which hookrun's does not know"
        )
    if not _equal(module, eager, takes, torch.float32, upcast=False):
        raise ValueError(f"the attention of {name} is not computed as hookrun's is")
    for upcast in (False, True):
        if _equal(module, eager, takes, torch.bfloat16, upcast=upcast):
            return upcast
    raise ValueError(f"the attention of {name} in bfloat16 is not computed as hookrun's is")


def _equal(
    module: nn.Module, eager: Callable[..., Any], takes: set[str], dtype: torch.dtype, *, upcast: bool
) -> bool:
    """Whether both functions give the same result for random tensors."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    groups = getattr(module, "num_key_value_groups", 1)
    heads = 2 * groups
    query = drawn(2, heads, _LENGTH, _WIDTH)
    key = drawn(2, 2, _KEYS, _WIDTH)
    value = drawn(2, 2, _KEYS, _WIDTH)
    more: dict[str, Any] = {"scaling": 0.4, "dropout": 0.0}
    if "softcap" in takes:
        more["softcap"] = 0.7
    if "position_bias" in takes:
        more["position_bias"] = drawn(1, heads, _LENGTH, _KEYS)
    mask = drawn(2, 1, _LENGTH, _KEYS)
    plain = nn.Module()
    plain.add_module("pattern", Pattern(upcast))
    with torch.no_grad():
        expected, weights = eager(module, query, key, value, mask, **more)
        actual, pattern = attention(plain, query, key, value, mask, **more)
    return torch.equal(expected, actual) and torch.equal(weights, pattern)
