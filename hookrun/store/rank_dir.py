"""The run directory as the ranks beside rank 0 have it: they write their captured rows, and rank 0 everything else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookrun.ranks.alone import Ranks
from hookrun.store.format import State
from hookrun.store.run_dir import RunDir

Lines = list[tuple[str, dict[str, Any]]]


class RankDir(RunDir):
    """The directory of a run, which rank 0 has made, in the process of another rank.

    kept: lines for stats.jsonl, samples.jsonl and tokens.jsonl that wait until rank 0 takes them
    """

    def __init__(self, path: Path, ranks: Ranks, buffer: int | None = None) -> None:
        super().__init__(path, buffer)
        self.ranks = ranks
        self.kept = Lines()

    def set_status(
        self,
        status: State,
        reason: str = "",
        exit_code: int | None = None,
        objective: Mapping[str, Any] | None = None,
    ) -> None:
        """Rank 0 writes the status of the run."""
        self.ended = status != "running"

    def write_manifest(self) -> None:
        """Rank 0 writes it."""

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        """The plan and the facts are those of rank 0."""

    def log_metrics(self, **values: Any) -> None:
        """Metrics are sums over all ranks, which rank 0 has too."""

    def log_stats(self, record: Mapping[str, Any]) -> None:
        """Keep it for rank 0."""
        self.kept.append(("stats", dict(record)))

    def log_sample(self, record: Mapping[str, Any]) -> None:
        """Keep it for rank 0."""
        self.kept.append(("sample", dict(record)))

    def log_token(self, token: int, text: str) -> None:
        """Keep it for rank 0."""
        self.kept.append(("token", {"token": token, "text": text}))


def take_kept(run_dir: RunDir) -> None:
    """Rank 0 writes the lines that the other ranks keep, in the order of the ranks; every rank calls it."""
    if not run_dir.ranks.several:
        return
    mine = run_dir.kept if isinstance(run_dir, RankDir) else Lines()
    given = run_dir.ranks.gathered(mine)
    if isinstance(run_dir, RankDir):
        run_dir.kept = Lines()
        return
    for kind, line in (each for lines in given[1:] for each in lines):
        if kind == "stats":
            run_dir.log_stats(line)
        elif kind == "sample":
            run_dir.log_sample(line)
        else:
            run_dir.log_token(line["token"], line["text"])
