"""The interface of a kind of data set, and checks of its root folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from hookrun.arguments import Args
from hookrun.data.info import DataInfo, Split
from hookrun.data.samples import Samples
from hookrun.errors import Problem, SpecError

A = TypeVar("A", bound=Args)


@dataclass(frozen=True)
class Source(ABC, Generic[A]):
    """A data set before its transforms; `args` is the model of its own arguments."""

    name: str
    args: ClassVar[type[Args]]

    @abstractmethod
    def inspect(self, root: Path | None, args: A, split: Split) -> DataInfo:
        """Shapes, dtypes and sizes before transforms; nothing is downloaded, and images are not decoded.

        Raises SpecError where what the split needs is missing or cannot be used.
        """

    @abstractmethod
    def open(self, root: Path | None, args: A, split: Split, seed: int) -> Samples:
        """The samples of a split in their fixed order. Raises SpecError as `inspect` does."""


def require_root(name: str, root: Path | None, hint: str) -> Path:
    """The root folder. Raises SpecError if none is given or it does not exist; `hint` says how to get the data."""
    if root is None:
        what = f"the data set '{name}' is read from a folder, and none is given"
        raise SpecError([Problem("data.root", what, hint)])
    if not root.is_dir():
        raise SpecError(
            [Problem("data.root", f"the data set '{name}' needs the folder {root}: not found", hint)]
        )
    return root
