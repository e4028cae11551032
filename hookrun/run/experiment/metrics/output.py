"""Which tensor of a model's output the loss and the metrics read, and which of its dimensions has the classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.values.containers import TargetError, children, get
from hookrun.engine.values.index import Key, Target, path_text
from hookrun.errors import HookrunError, listed
from hookrun.run.experiment.metrics.rows import (
    Kind,
    are_classes,
    are_labels,
    first_tensor,
    fits,
    main_tensor,
)

WHERE = "train.output"

_PREFERRED = (("logits",), ("out",))
"""The ends of paths that are taken before others that fit as well."""


@dataclass(frozen=True)
class Place:
    """Where a tensor is in the model's output.

    keys:      its path
    class_dim: the dimension of the class scores
    others:    the paths of other tensors that fit as well
    """

    keys: tuple[Key, ...]
    class_dim: int
    others: tuple[str, ...] = ()

    def of(self, output: Any) -> Tensor:
        """The tensor, with its classes in dimension 1; in the only dimension of a sample that is not batched."""
        tensor: Tensor = get(output, self.keys)
        return tensor if self.class_dim < 2 else tensor.movedim(self.class_dim, 1)


@dataclass(eq=False)
class OutputReader:
    """Reads the tensor of an output that fits the targets. The first output of a form decides for all of that form.

    path:      `train.output`; None: the first tensor that fits, a member named `logits` or `out` before others
    classes:   how many labels the data has; a tensor with as many scores is taken before others. None: not known
    class_dim: the dimension of the class scores; None: 1, as in torch, or the last one if only that fits
    """

    path: Target | None = None
    classes: int | None = None
    class_dim: int | None = None

    def __post_init__(self) -> None:
        self._places = dict[Any, Place | None]()

    def named(self, output: Any, path: Target | None = None) -> Any:
        """The tensor at `train.output`, or at a metric's own path; without a path the whole output.

        A model that returns one tensor in evaluation and several in training has nothing else to name then.

        Raises HookrunError if there is no tensor at the path.
        """
        path = path or self.path
        if path is None or isinstance(output, Tensor):
            return output
        return at(output, path)

    def place(self, output: Any, target: Tensor, kind: Kind) -> Place | None:
        """Where the tensor is that fits the targets; None if none does."""
        members = list(named_tensors(output))
        form = (kind, *((keys, tensor.dim()) for keys, tensor in members))
        if form not in self._places:
            self._places[form] = self._chosen(members, target, kind)
        return self._places[form]

    def read(self, output: Any, target: Tensor, kind: Kind) -> Tensor:
        """The tensor that fits the targets, with its classes in dimension 1; the main tensor if none fits."""
        place = self.place(output, target, kind)
        return main_tensor(output) if place is None else place.of(output)

    def scores(self, output: Any, target: Tensor) -> Tensor | None:
        """The tensor from which metrics of samples are computed; None if there is none."""
        place = self.place(output, target, "rows")
        return first_tensor(output, target) if place is None else place.of(output)

    def class_dims(self, scores: Tensor, target: Tensor) -> list[int]:
        """The dimensions of scores that may have the classes of these labels; -1 is the last."""
        if target.is_floating_point():
            return [1] if are_classes(scores, target) else []
        if scores.dim() < 2:
            return [0] if are_labels(scores, target) else []
        dims = (1, -1) if self.class_dim is None else (self.class_dim,)
        fitting: list[int] = []
        for dim in dims:
            is_there = -scores.dim() <= dim < scores.dim()
            if is_there and are_labels(scores.movedim(dim, 1), target) and dim % scores.dim() not in fitting:
                fitting.append(dim % scores.dim())
        return fitting

    def _chosen(
        self, members: list[tuple[tuple[Key, ...], Tensor]], target: Tensor, kind: Kind
    ) -> Place | None:
        shapes: dict[tuple[Key, ...], torch.Size] = {}
        class_dims: dict[tuple[Key, ...], int] = {}
        exact: list[tuple[Key, ...]] = []
        for keys, tensor in members:
            class_dim = self._fit(tensor, target, kind)
            if class_dim is None:
                continue
            shapes[keys] = tensor.shape
            class_dims[keys] = class_dim
            # one score for each class of the data, or the shape of the targets
            if tensor.shape == target.shape or self.classes in tensor.shape[class_dim : class_dim + 1]:
                exact.append(keys)
        closest = exact or list(class_dims)
        if not closest:
            return None
        named = [keys for keys in closest if keys[-1:] in _PREFERRED]
        best = (named or closest)[0]
        others = [keys for keys in closest if keys != best and (not named or shapes[keys] == shapes[best])]
        return Place(best, class_dims[best], tuple(map(path_text, others)))

    def _fit(self, tensor: Tensor, target: Tensor, kind: Kind) -> int | None:
        """The dimension of the classes in a tensor that fits; None: it does not."""
        if not tensor.is_floating_point():
            return None
        if kind == "scores" or (kind == "rows" and not target.is_floating_point()):
            dims = self.class_dims(tensor, target)
            if dims:
                return dims[0]
        if kind != "scores" and fits(tensor, target, "tokens" if kind == "tokens" else "values"):
            return 1
        return None


def at(output: Any, path: Target) -> Tensor:
    """The tensor of an output at a path. HookrunError if there is none, with the nearest paths."""
    try:
        member = get(output, path.keys)
    except TargetError as error:
        raise HookrunError(str(error)) from error
    if not isinstance(member, Tensor):
        inside = [path_text(keys) for keys, _ in named_tensors(member, path.keys)]
        raise HookrunError(f"{str(path)!r} is not a tensor, and holds {listed(inside)}")
    return member


def named_tensors(value: Any, keys: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Tensor]]:
    """Every tensor of a value with its path; nested tensors, which have no shape, are left out."""
    if isinstance(value, Tensor) and not value.is_nested:
        yield keys, value
    for key, member in children(value):
        yield from named_tensors(member, (*keys, key))
