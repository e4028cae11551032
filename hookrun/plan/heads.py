"""How many attention heads the value of a module has, according to the model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hookrun.spec.heads import Heads

_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_COUNTS = ("num_key_value_heads", "n_kv_heads")
_WIDTHS = ("head_dim", "d_kv", "head_size")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True)
class HeadCount:
    """The heads of one module.

    counts: number of query heads, and of key heads if there are fewer
    width:  size of one head; None: not known
    """

    counts: tuple[int, ...]
    width: int | None = None


def head_count(model: nn.Module, path: str, heads: Heads) -> HeadCount | None:
    """The head count given by `heads`, by the module, or by a parent module or its configuration; None if none has one.

    path: path of the hooked module
    """
    if heads.count is not None:
        return HeadCount((heads.count,))
    parents = [path.rsplit(".", up)[0] for up in range(path.count(".") + 1)] if path else []
    for module in [*map(model.get_submodule, parents), model]:
        for owner in (module, getattr(module, "config", None)):
            if (count := _number(owner, _COUNTS)) is not None:
                width, hidden = _number(owner, _WIDTHS), _number(owner, _HIDDEN)
                if width is None and hidden is not None and hidden % count == 0:
                    width = hidden // count
                # An attention module has its configuration in an attribute.
                keys = _number(owner, _KEY_COUNTS) or _number(getattr(owner, "config", None), _KEY_COUNTS)
                return HeadCount(tuple(dict.fromkeys([count, keys or count])), width)
    return None


def _number(owner: Any, names: tuple[str, ...]) -> int | None:
    """The first attribute of these names that is a positive whole number."""
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
