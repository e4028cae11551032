"""The action `print`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hookrun.engine.actions.base import Action, Edit, HookSite
from hookrun.engine.actions.stats import measuring
from hookrun.engine.values.tensors import elements, holds_data, shape_of

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 1000  # elements that one record shows


class Print(Action):
    """Print and record each tensor's shape, its statistics (mean, std, min, max), or its elements.

    what: `shape`, `stats` or `value`. Of a tensor with more than 1000 elements `value` shows the first 1000 as one flat
          list, with the tensor's shape and, as `truncated`, its number of elements

    A None in the value, such as a missing gradient, is shown as a shape of null. `value` waits for the device.
    """

    action_name = "print"
    observes = True
    scope = "value"
    what: Literal["shape", "stats", "value"] = "shape"

    def build(self, site: HookSite) -> Edit:
        """A function that prints and records every tensor in the value."""
        from hookrun.engine.values.containers import leaves

        statistics = measuring(("mean", "std", "min", "max"))
        describe = {"shape": _shape, "stats": statistics, "value": _value}[self.what]

        def show(value: Any) -> None:
            for path, leaf in leaves(value):
                site.emit({"shape": None} if leaf is None else describe(leaf), path, show=True)

        return show


def _shape(x: Tensor) -> dict[str, Any]:
    return {"shape": shape_of(x)}


def _value(x: Tensor) -> dict[str, Any]:
    if not holds_data(x):
        return {"value": None, **_shape(x)}
    x, total = x.detach().dequantize() if x.is_quantized else x.detach(), x.numel()
    if total <= LIMIT:
        return {"value": _rounded([part.tolist() for part in x.unbind()] if x.is_nested else x.tolist())}
    return {"value": _rounded(elements(x).flatten()[:LIMIT].tolist()), "truncated": total, **_shape(x)}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, complex):
        return [_rounded(value.real), _rounded(value.imag)]
    # six significant digits: a float32 has about seven
    return float(f"{value:.6g}") if isinstance(value, float) else value
