"""The part of a tensor that `tokens` selects: a row for each sample and position."""

from __future__ import annotations

from torch import Tensor

from hookrun.runtime.current_call import TokensNow
from hookrun.runtime.part import Part
from hookrun.runtime.tokens.choice import Chosen, Rule
from hookrun.runtime.tokens.passes import Pass


class Indexed:
    """The part that `index` selects, in which `tokens` then selects positions."""

    def __init__(self, part: Part, tokens: TokensPart) -> None:
        self._part, self._tokens = part, tokens

    def of(self, tensor: Tensor) -> Tensor:
        """The part. Raises ValueError if the index selects samples or positions, which `tokens` needs whole."""
        if not self._part.leaves(self._tokens.dims, tensor.dim()):
            raise ValueError(
                f"`index` picks samples or positions of a tensor of shape {list(tensor.shape)}, and `tokens` needs "
                "all of them: let `index` begin with ..., or leave it out"
            )
        return self._part.of(tensor)

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor in which `new` replaces the part."""
        return self._part.put(tensor, new)

    def nothing_of(self, tensor: Tensor) -> bool:
        """Never: `of` raises for an empty part."""
        return False

    def keeps_samples(self, dims: int) -> bool:
        """Always: `of` raises if a sample is left out."""
        return True


class TokensPart:
    """The selected positions of a tensor with a sequence dimension, as rows [N, ...].

    now: finds the tokens of the current firing
    """

    def __init__(self, rule: Rule, now: TokensNow) -> None:
        self._rule, self._now = rule, now
        # for a cache: a later part may get the id of this one, and this one would keep its model alive
        self._key = object()
        tokens = rule.tokens
        if tokens.on_pattern:
            axes = ((tokens.query, -2), (tokens.key, -1))
            self._dims = tuple(dim for axis, dim in axes if axis is not None)
        else:
            self._dims = (tokens.dim if tokens.dim is not None else 1,)

    def of(self, tensor: Tensor) -> Tensor:
        """[N, ...]: a copy of the N positions. Raises ValueError if the tensor does not have that dimension."""
        chosen = self.chosen(tensor)
        return self._rows(tensor)[chosen.on(tensor.device)]

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor in which `new` replaces the positions."""
        chosen, changed = self.chosen(tensor), tensor.clone()
        self._rows(changed)[chosen.on(tensor.device)] = new
        return changed

    def nothing_of(self, tensor: Tensor) -> bool:
        """Whether the current pass computes none of the positions."""
        return not len(self.chosen(tensor))

    def keeps_samples(self, dims: int) -> bool:
        """Never: a sample can have any number of positions."""
        return False

    def chosen(self, tensor: Tensor) -> Chosen:
        """The positions in this tensor. Raises ValueError if the tokens of the call are not known."""
        found = self._now.current
        if found is None:
            raise ValueError(
                "tokens: it is not known which tokens the call computes; call the model with input_ids, or "
                "hooks.tokens(input_ids, attention_mask) before it; for a value without tokens use `index`"
            )
        key = (self._key, tensor.shape)  # cached: a firing needs it several times
        if (chosen := found.chosen.get(key)) is None:
            chosen = found.chosen[key] = self._choose(tensor, found)
        self._now.note(chosen)
        return chosen

    def _choose(self, tensor: Tensor, found: Pass) -> Chosen:
        self._require_dims(tensor, found)
        if self._rule.tokens.on_pattern:
            sizes: tuple[int, ...] = tuple(tensor.shape[-2:])
        else:
            sizes = (tensor.shape[self._dims[0]],)
        return self._rule.choose(found, sizes, self._now.samples)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of a tensor along which positions are selected: one, or two for attention patterns."""
        return self._dims

    def _rows(self, tensor: Tensor) -> Tensor:
        """A view of the tensor with the position dimensions moved right after the first dimension."""
        if self._dims == (1,):
            return tensor
        return tensor.movedim(self._dims, tuple(range(1, len(self._dims) + 1)))

    def _require_dims(self, tensor: Tensor, found: Pass) -> None:
        shape = list(tensor.shape)
        if self._rule.tokens.on_pattern:
            if tensor.dim() < 3:
                raise ValueError(
                    f"tokens: query and key are the last two dimensions of an attention pattern, and the tensor has "
                    f"shape {shape}"
                )
        elif tensor.dim() <= self._dims[0]:
            raise ValueError(
                f"tokens: the tensor of shape {shape} does not have a dimension {self._dims[0]}; name another one "
                "with `dim`, or the tensor with `target`"
            )
        if tensor.shape[0] != found.rows:
            raise ValueError(
                f"tokens: the tensor of shape {shape} does not have a row for each of the {found.rows} sequences of "
                "the call; name the tensor with `target`"
            )
