"""The positions of the shard folders of a run directory, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookrun.ranks.alone import Ranks
from hookrun.store.format import CAPTURES, PREDICTIONS

if TYPE_CHECKING:
    from hookrun.store.position import FolderPosition, PositionRecord
    from hookrun.store.writer import CaptureWriter

NAMES = (CAPTURES, PREDICTIONS)


def shard_positions(
    ranks: Ranks, writers: Mapping[str, CaptureWriter], reached: PositionRecord | None
) -> dict[str, Any]:
    """Collective: folder name -> its FolderPosition over all ranks. Each rank writes its buffered rows first.

    writers: folder name -> writer, for folders written since the run began or was resumed
    reached: the position that the run was resumed from; None: a new run
    """
    found = ranks.gathered({name: _own(name, ranks.rank, writers, reached) for name in NAMES})
    return {
        name: {
            **found[0][name],
            "others": [*(each[name] for each in found[1:]), *_of_absent(name, ranks, reached)],
        }
        for name in NAMES
    }


def _own(
    name: str, rank: int, writers: Mapping[str, CaptureWriter], reached: PositionRecord | None
) -> dict[str, Any]:
    if name in writers:
        return writers[name].position()
    before: FolderPosition | None = getattr(reached, name, None)
    if before is None:
        return {"index": 0, "shards": 0, "counts": {}, "turns": False}
    return before.of_rank(rank).model_dump(exclude={"others"})


def _of_absent(name: str, ranks: Ranks, reached: PositionRecord | None) -> list[dict[str, Any]]:
    """The positions of ranks that an earlier process of the run had and this one lacks."""
    before: FolderPosition | None = getattr(reached, name, None)
    return [] if before is None else [each.model_dump() for each in before.others[ranks.size - 1 :]]
