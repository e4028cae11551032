"""What is said of a sweep that a signal ended: how many jobs ended how, and which were never started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import filter_overrides

from hookrun.errors import listed

_SHOWN = 8


def interrupted(
    interruption: KeyboardInterrupt, sweep_dir: Path, jobs: Sequence[Sequence[str]] | None
) -> str:
    """The lines about it.

    jobs: the overrides of each job; None where the sweeper chooses them as it goes
    """
    from hookrun.report.jobs import find_jobs

    found = {job.name: job.status for job in find_jobs(sweep_dir)} if sweep_dir.is_dir() else {}
    counts = Counter(found.values())
    started = {name for name, status in found.items() if status != "not started"}
    missing = len(jobs or ()) - len(started)
    if missing > 0:
        counts["not started"] = missing
    said = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no job started"
    lines = [f"sweep: {str(interruption) or 'interrupted'}: {said}, in {sweep_dir}"]
    if jobs and missing > 0 and all(name.isdecimal() for name in started):  # else names do not tell which
        shared = set.intersection(*map(set, jobs))
        names = [
            f"#{number} ({' '.join(each for each in filter_overrides(overrides) if each not in shared)})"
            for number, overrides in enumerate(jobs)
            if str(number) not in started
        ]
        lines.append(f"  not started: {listed(names, _SHOWN)}")
    return "\n".join(lines)
