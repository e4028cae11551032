"""Which dimension of each tensor that a hook sees is the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hookrun.engine.values.index import joined

Followers = Mapping[str, tuple[int, ...]]
"""Path of a tensor in a value -> its dimensions that are as long as the batch, for each size of the batch."""

Shapes = Mapping[str, Sequence[int]]
"""Path of a tensor in a value -> its shape."""


@dataclass
class BatchDims:
    """Which dimension of the tensors that one hook sees at one module is the batch.

    followers: path of a tensor -> its dimensions that follow the batch; None: not known
    given:     the hook's `batch_dim`, which holds for every tensor; None: it is not given
    target:    the hook's target, which the paths begin with
    """

    followers: Followers | None = None
    given: int | None = None
    target: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the trial run or the hook says which dimensions follow the batch."""
        return self.given is not None or bool(self.followers)

    @property
    def is_first(self) -> bool:
        """Whether it is dimension 0 of every tensor."""
        if self.given is not None or not self.followers:
            return self.given == 0
        return all(dims[:1] == (0,) for dims in self.followers.values())

    @property
    def is_uniform(self) -> bool:
        """Whether it is known, and the same for all tensors."""
        return self.given is not None or len(set((self.followers or {}).values())) == 1

    def of(self, path: str) -> int | None:
        """The batch dimension of the tensor at this path below the target; None: no dimension follows the batch.

        It is 0 where nothing is known. Where all tensors of the trial run agree, a tensor at a path that it did not
        have is as they are.
        """
        if self.given is not None or not self.followers:
            return self.given or 0
        dims = self.followers.get(joined(self.target, path))
        if dims is None:
            dims = next(iter(self.followers.values())) if self.is_uniform else ()
        return dims[0] if dims else None


def followers_of(calls: Iterable[tuple[Shapes, Shapes]], sizes: tuple[int, int]) -> Followers:
    """The dimensions of each tensor that are as long as the batch in every call of a module; none where calls differ.

    calls: the shapes of each call in two runs, whose batches have these sizes
    """
    followers: dict[str, tuple[int, ...]] = {}
    for small, large in calls:
        for path, shape in small.items():
            other = large.get(path, ())
            dims: tuple[int, ...] = ()
            if len(shape) == len(other):
                pairs = enumerate(zip(shape, other, strict=True))
                dims = tuple(dim for dim, pair in pairs if pair == sizes)
            followers[path] = dims if followers.get(path, dims) == dims else ()
    return followers
