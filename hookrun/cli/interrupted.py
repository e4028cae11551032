"""The message about a sweep that a signal ended: the number of jobs of each status, and the jobs never started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.utils import filter_overrides

from hookrun.errors import listed

_SHOWN = 8


def interrupted(
    interruption: KeyboardInterrupt,
    sweep_dir: Path,
    jobs: Sequence[Sequence[str]] | None,
    names: Mapping[int, str] | None = None,
) -> str:
    """The lines of the message.

    jobs:  the overrides of each job; None where the sweeper chooses its jobs while it runs
    names: of a resumed sweep, job index -> directory of the job; None for a new sweep
    """
    from hookrun.report.jobs import find_jobs

    found = {job.name: job.status for job in find_jobs(sweep_dir)} if sweep_dir.is_dir() else {}
    started = {name for name, status in found.items() if status != "not started"}
    counts = Counter(found.values())
    if names is None:
        is_listed = all(name.isdecimal() for name in started)  # else the names do not give the job index
        missing = [place for place in range(len(jobs or ())) if str(place) not in started]
        count = len(missing) if is_listed else len(jobs or ()) - len(started)
    else:
        is_listed = True
        missing = [place for place in range(len(jobs or ())) if names.get(place) not in started]
        count = len(missing)
    if jobs is not None:
        counts["not started"] = max(count, 0)
    said = ", ".join(f"{number} {status}" for status, number in counts.items() if number) or "no job started"
    lines = [f"sweep: {str(interruption) or 'interrupted'}: {said}, in {sweep_dir}"]
    if jobs and count > 0 and is_listed:
        shared = set.intersection(*map(set, jobs))
        typed = [[each for each in filter_overrides(jobs[place]) if each not in shared] for place in missing]
        told = [f"#{place} ({' '.join(texts)})" for place, texts in zip(missing, typed, strict=True)]
        lines.append(f"  not started: {listed(told, _SHOWN)}")
    return "\n".join(lines)
