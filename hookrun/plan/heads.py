"""How many attention heads the value of a module has, according to the model's configuration."""

from __future__ import annotations

from collections.abc import Iterator
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
    for module in _upwards(model, path):
        for said in (module, getattr(module, "config", None)):
            if said is not None and (count := _number(said, _COUNTS)) is not None:
                return _counted(said, count)
    return None


def _upwards(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The module at the path, then each of its parents."""
    while path:
        yield model.get_submodule(path)
        path = path.rpartition(".")[0]
    yield model


def _counted(said: Any, count: int) -> HeadCount:
    width = _number(said, _WIDTHS)
    hidden = _number(said, _HIDDEN)
    if width is None and hidden is not None and hidden % count == 0:
        width = hidden // count
    keys = _number(said, _KEY_COUNTS)
    if keys is None:  # an attention module has its configuration in an attribute
        keys = _number(getattr(said, "config", None), _KEY_COUNTS)
    return HeadCount(tuple(dict.fromkeys([count, keys or count])), width)


def _number(said: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        found = getattr(said, name, None)
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return None
