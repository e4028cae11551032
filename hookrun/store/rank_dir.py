"""The run directory in the other ranks: they write their captured rows, and rank 0 writes everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookrun.ranks.alone import Ranks
from hookrun.store.format import METRICS, Line, State, decode, encode
from hookrun.store.run_dir import RunDir
from hookrun.store.states.position import read_position


class RankDir(RunDir):
    """The run directory in a process of another rank; rank 0 created it.

    position: of the files if the run is resumed, from the state; None if it is not resumed

    kept: (name of the file, line) of each line that rank 0 writes
    """

    def __init__(
        self,
        path: Path,
        ranks: Ranks,
        buffer: int | None = None,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, buffer)
        if position is not None:
            self.go_on_from(read_position(path, position))
        self.ranks = ranks
        self.kept: list[Line] = []

    def set_status(
        self,
        status: State,
        reason: str = "",
        exit_code: int | None = None,
        objective: Mapping[str, Any] | None = None,
    ) -> None:
        """Does nothing: rank 0 writes the status."""
        self.ended = status != "running"

    def write_manifest(self) -> None:
        """Rank 0 writes the manifest."""

    def written(self) -> dict[str, Any]:
        """Flush this rank's rows; rank 0 knows the position of the files."""
        self.shard_positions()
        return {}

    def sync(self) -> None:
        """Does nothing: rank 0 writes the lines."""

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        """Rank 0 writes the plan and the other JSON files."""

    def append(self, stream: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep the lines for rank 0 as plain JSON values: an action may record numbers of NumPy and torch.

        Rank 0 writes the metrics, which are means over all ranks.
        """
        if stream != METRICS:
            self.kept += [(stream, decode(encode(record).encode())) for record in records]

    def write_pictures(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Rank 0 writes the pictures of the samples of all ranks."""


def take_kept(run_dir: RunDir) -> None:
    """Rank 0 writes the lines that the other ranks keep, in the order of the ranks; every rank must call it."""
    if not run_dir.ranks.several:
        return
    given = run_dir.ranks.gathered(list(run_dir.kept))
    if isinstance(run_dir, RankDir):
        run_dir.kept = []
        return
    for stream, line in (each for lines in given[1:] for each in lines):
        run_dir.append(stream, [line])
