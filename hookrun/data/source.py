"""The interface of a kind of data set, and what kinds share: the root folder, fixed splits, generated samples."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from hookrun.data.info import DataInfo, Split
from hookrun.data.samples import Samples
from hookrun.engine.validation import Args
from hookrun.errors import nearest, spec_error


class Source(Args):
    """A data set before its transforms; the fields of a subclass are the keys of `data.args`.

    name: the word after `data.name=`
    """

    name: ClassVar[str]

    @abstractmethod
    def inspect(self, root: Path | None, split: Split) -> DataInfo:
        """Shapes, dtypes and sizes before transforms; nothing is downloaded, and images are not decoded.

        Raises SpecError where what the split needs is missing or cannot be used.
        """

    @abstractmethod
    def open(self, root: Path | None, split: Split, seed: int) -> Samples:
        """The samples of a split in their fixed order. Raises SpecError as `inspect` does."""


def require_root(name: str, root: Path | None, hint: str) -> Path:
    """The root folder. Raises SpecError if none is given or it does not exist; `hint` says how to get the data."""
    if root is None:
        raise spec_error("data.root", f"the data set '{name}' is read from a folder, and none is given", hint)
    if not root.is_dir():
        raise spec_error("data.root", f"the data set '{name}' needs the folder {root}: not found", hint)
    return root


MOST_FILE = 2**28
"""Bytes of a file of text."""

Stamp = tuple[int, int, int]
"""Inode, size and time of a file, which change with its content."""


def checked_file(
    name: str | None, root: Path | None, where: str, suffixes: tuple[str, ...], most: int = MOST_FILE
) -> tuple[Path, Stamp]:
    """The path and the stamp of a file that can be read; a relative path starts at the root or the working directory.

    most: the bytes that it may have

    Raises SpecError, at the key `where`, for a file that cannot be read.
    """
    if not name:
        raise spec_error(where, "is missing: no file is named", f"set {where}=FILE")
    path = (root or Path.cwd()) / Path(name).expanduser()
    if path.suffix not in suffixes:
        raise spec_error(where, f"{path} does not end in {' or '.join(suffixes)}", "give such a file")
    if not path.is_file():
        what = f"there is no file {path}"
        if path.parent.is_dir():
            what += f"; beside it {nearest(path.name, [each.name for each in path.parent.iterdir()])}"
        raise spec_error(
            where,
            what,
            "correct the path; a relative one starts at data.root, or where none is set at the working directory",
        )
    stat = path.stat()
    if stat.st_size > most:
        raise spec_error(
            where,
            f"{path} has {stat.st_size / 2**20:,.0f} MiB, and at most {most / 2**20:,.0f} are read",
            "split it, or give a part of it",
        )
    return path, (stat.st_ino, stat.st_size, stat.st_mtime_ns)


# NumPy's policy (NEP 19) fixes RandomState's stream, so the parts never change. They must not follow the
# experiment's seed: a checkpoint evaluated under another seed would be tested on samples it was trained on.
_SEED = 0


def val_count(total: int, fraction: float) -> int:
    """How many of `total` samples are for validation; each part gets at least one, unless fraction is 0 or 1."""
    count = round(total * fraction)
    return min(max(count, 1), total - 1) if 0 < fraction < 1 and total > 1 else count


def part_of(total: int, fraction: float, split: Split) -> Sequence[int]:
    """The indices of one split of `total` samples, drawn at random, in ascending order."""
    if fraction in (0, 1):
        has_all = split == ("val" if fraction == 1 else "train")
        return range(total if has_all else 0)
    order = np.random.RandomState(_SEED).permutation(total).tolist()
    count = val_count(total, fraction)
    return sorted(order[:count] if split == "val" else order[count:])


def stratified_part(labels: Sequence[int | None], fraction: float, split: Split) -> list[int]:
    """As `part_of`, with the fraction taken of each class separately."""
    groups = defaultdict[int | None, list[int]](list)
    for index, label in enumerate(labels):
        groups[label].append(index)
    rows: list[int] = []
    for group in groups.values():
        rows += [group[number] for number in part_of(len(group), fraction, split)]
    return sorted(rows)


class Generated(Source):
    """A data set of samples that are drawn. Sizes of the splits; seed: of the samples, null: the experiment's."""

    train_size: int = Field(default=4096, ge=0, le=10**9)
    val_size: int = Field(default=512, ge=0, le=10**9)
    seed: int | None = Field(default=0, ge=0, lt=2**63)

    @property
    def sizes(self) -> dict[Split, int | None]:
        """The number of samples of each split."""
        return {"train": self.train_size, "val": self.val_size}

    def size(self, split: Split) -> int:
        """The number of samples of a split. Raises SpecError where it has none."""
        count = self.train_size if split == "train" else self.val_size
        if count == 0:
            where = f"data.args.{split}_size"
            raise spec_error(where, f"the split '{split}' has no samples", f"set {where}")
        return count

    def generator(self, split: Split, seed: int, number: int) -> torch.Generator:
        """The generator of a sample, always in the same state. seed: the experiment's."""
        name = f"{seed if self.seed is None else self.seed}/{split}/{number}"
        # Hashed, because torch's CPU generator keeps only the low 32 bits of a seed.
        digest = hashlib.sha256(name.encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
