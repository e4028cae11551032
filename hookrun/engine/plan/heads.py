"""How many heads the value of a hooked module has, and whether its last dimension can hold them."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookrun.engine.plan.attention_points import OUTPUT_PROJECTIONS
from hookrun.engine.plan.plan import HeadCount
from hookrun.engine.spec.heads import Heads

# attributes of a model or its configuration
_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_COUNTS = ("num_key_value_heads", "n_kv_heads")
_WIDTHS = ("head_dim", "d_kv", "head_size")
_HIDDEN = ("hidden_size", "n_embd", "d_model")

_INTO_HEADS = frozenset(
    {"q", "k", "v", "wq", "wk", "wv", "query", "key", "value", "queries", "keys", "values"}
)
"""Words in the names of modules whose output is queries, keys or values, such as q_proj, query and k_norm."""
_ATTENTION = ("attn", "attention")


def head_count(model: nn.Module, path: str, heads: Heads) -> HeadCount | None:
    """The head count given by `heads`, by the module, or by a parent module or its configuration; None if none has one.

    path: path of the hooked module
    """
    if heads.count is not None:
        return HeadCount((heads.count,))
    parents = [path.rsplit(".", up)[0] for up in range(path.count(".") + 1)] if path else []
    for module in [*map(model.get_submodule, parents), model]:
        for owner in (module, getattr(module, "config", None)):
            count = _number(owner, _COUNTS)
            if count is not None:
                return _head_count_of(owner, count)
    return None


def _head_count_of(owner: Any, count: int) -> HeadCount:
    """The head count of a module or configuration that says how many query heads there are."""
    width = _number(owner, _WIDTHS)
    hidden = _number(owner, _HIDDEN)
    if width is None and hidden is not None and hidden % count == 0:
        width = hidden // count
    # An attention module has its configuration in an attribute.
    keys = _number(owner, _KEY_COUNTS) or _number(getattr(owner, "config", None), _KEY_COUNTS)
    counts = (count,) if keys in (None, count) else (count, keys)
    return HeadCount(counts, width)


def _number(owner: Any, names: tuple[str, ...]) -> int | None:
    """The first attribute of these names that is a positive whole number."""
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def last_dimension_holds_heads(model: nn.Module, path: str, *, of_input: bool) -> bool:
    """Whether the last dimension of a module's output, or input, can be heads x width, by the names in the model.

    It can in the output of a projection to queries, keys or values, of an attention module that has no other
    projections, and of a module of an attention module that has no parameters; and in the input of an attention
    module's output projection. Elsewhere, as in the residual stream, it is a sum over the heads.
    """
    module = model.get_submodule(path)
    nearest = path.split(".")[-2:]  # the projection may be in a wrapper
    holding = [name for name, part in module.named_modules() if part._parameters or part._buffers]
    classes = " ".join(type(part).__name__ for part in module.modules()).lower()
    into_heads = any(map(_is_into_heads, nearest))
    if not holding:
        return _in_attention(model, path) and "dropout" not in classes
    if not of_input:
        return into_heads or all(any(map(_makes_heads, name.split("."))) for name in holding)
    if into_heads:
        return "norm" in classes
    projects = any(name.lower() in OUTPUT_PROJECTIONS for name in nearest)
    return projects and "norm" not in classes and _in_attention(model, path)


def _is_into_heads(name: str) -> bool:
    return len(_INTO_HEADS.intersection(name.lower().split("_"))) == 1


def _makes_heads(name: str) -> bool:
    return _is_into_heads(name) or "qkv" in name.lower()


def _in_attention(model: nn.Module, path: str) -> bool:
    """Whether the module's parent, or the parent of that, is an attention module."""
    for up in (1, 2):
        owner = ".".join(path.split(".")[:-up])
        module = model.get_submodule(owner)
        names = f"{owner.rpartition('.')[2]} {type(module).__name__}".lower()
        if any(word in names for word in _ATTENTION) or _number(module, _COUNTS) is not None:
            return True
        if any(_makes_heads(name) for name, _ in module.named_children()):
            return True
    return False
