"""The action `flip_bits`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from hookrun.engine.actions.base import MOST_FAULTS, Action, Edit, HookSite
from hookrun.engine.actions.fields import Finite, Seed
from hookrun.engine.actions.values import RunFaults
from hookrun.engine.hook_types import HookType
from hookrun.engine.values.tensors import require_real, require_whole

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class FlipBits(Action):
    """Flip bits of the elements at random, as faults of hardware do, and list each flip in faults.jsonl.

    rate:   the probability of each bit to be flipped
    count:  flip exactly so many bits instead
    bits:   the bits that may be flipped, such as `[23, 31]`, from 0, the lowest; by default all. Of a float32 31 is the
            sign and 23 to 30 are the exponent
    per:    `count` is for the whole `batch`, or for each `sample` of it
    seed:   seed of the hook's own generator; by default derived from the experiment's seed
    faults: instead of drawing, repeat what the hook of the same name has flipped in another run, `{run: PATH}`: at the
            same modules, calls and elements, whatever `index`, `tokens` and `heads` say

    Of floating-point and integer tensors, each by itself; boolean ones stay as they are. The flips are the same on
    every device and for any number of ranks; the global random generators are not used. The gradient passes straight
    through. A line of faults.jsonl has hook, module and moment, `sample`, `element` (the index in the whole flattened
    tensor, also under `index`, `tokens` and `heads`), `bit`, and the element's value `before` and `after` all flips of
    the call. A hook may make 200,000 flips in a run. `task=effects` lists none of its cells.
    """

    action_name = "flip_bits"
    uses = ("flipped",)
    rate: Annotated[Finite, Field(ge=0, le=1)] | None = None
    count: Annotated[int, Field(strict=True, ge=0, le=MOST_FAULTS)] | None = None
    bits: tuple[Annotated[int, Field(strict=True, ge=0, lt=64)], ...] | None = None
    per: Literal["batch", "sample"] = "batch"
    seed: Seed = None
    faults: RunFaults | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> FlipBits:
        if sum(value is not None for value in (self.rate, self.count, self.faults)) != 1:
            raise ValueError("give one of rate, count, faults")
        if self.faults is not None and (others := self.model_fields_set - {"faults"}):
            raise ValueError(f"`faults` repeats a list: leave out {', '.join(sorted(others))}")
        if self.bits == ():
            raise ValueError("bits: the list is empty")
        if self.count is None and "per" in self.model_fields_set:
            raise ValueError("`per` goes with `count`")
        return self

    @property
    def any_dtype(self) -> bool:
        """Integers have bits too."""
        return True

    @property
    def works_by_sample(self) -> bool:
        """With `per: sample`."""
        return self.per == "sample" or super().works_by_sample

    def carried_by(self, hook_type: HookType) -> str | None:
        """`per: sample` needs a batch of samples."""
        if self.per == "sample" and not hook_type.batch:
            return f"per: sample needs samples, and {hook_type} sees none: use per: batch"
        return super().carried_by(hook_type)

    def build(self, site: HookSite) -> Edit:
        """A function x -> a copy of x with flipped bits."""
        import torch

        def flip(x: Tensor) -> Tensor | None:
            if x.dtype is torch.bool:
                return None
            require_real(x)
            require_whole(x)
            if x.is_quantized or x.layout is not torch.strided:
                raise ValueError(
                    "the tensor is quantized or sparse: hook a module that returns ordinary numbers"
                )
            width = 8 * x.element_size()
            bits = sorted(set(self.bits or range(width)))
            if bits[-1] >= width:
                name = str(x.dtype).removeprefix("torch.")
                raise ValueError(f"bits: {name} has the bits 0 to {width - 1}, and not {bits[-1]}")
            return site.flipped(x, bits, self._draw, by_sample=self.per == "sample")

        return flip

    def _draw(self, size: int, generator: np.random.Generator) -> Any:
        """An array of different numbers below `size`. ValueError for too many."""
        count = generator.binomial(size, self.rate or 0) if self.count is None else self.count
        if count > size > 0:
            raise ValueError(f"count: {count} is more than the {size:,} bits that may be flipped")
        if count > MOST_FAULTS:
            raise ValueError(
                f"{count:,} flips at once, and a hook may make {MOST_FAULTS:,} in a run, which are all listed: give a "
                "smaller rate, fewer `bits`, or select less"
            )
        return generator.choice(size, min(count, size), replace=False)
