"""What share of the package the tests ran: lines and branches, by folder. ``COVERAGE=1 scripts/test`` ends with it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path, PurePath
from typing import Any

from coverage import Coverage

COUNTS = {
    "lines": ("covered_lines", "num_statements"),
    "branches": ("covered_branches", "num_branches"),
}


def by_folder(files: dict[str, dict[str, Any]]) -> dict[str, Counter[str]]:
    """The sums of coverage.py's counts, by the folder within hookrun, and those of all."""
    folders: dict[str, Counter[str]] = {}
    for path, about in files.items():
        parts = PurePath(path).parts
        for name in ("/".join(parts[:2]) if len(parts) > 2 else parts[0], "all"):
            counts = {key: value for key, value in about["summary"].items() if isinstance(value, int)}
            folders.setdefault(name, Counter()).update(counts)
    return folders


def row(name: str, counts: Counter[str]) -> str:
    """A folder with its percentages; a dash where there is nothing to run."""
    parts = [
        f"{100 * counts[covered] / counts[there]:9.1f}" if counts[there] else f"{'–':>9}"
        for covered, there in COUNTS.values()
    ]
    return f"{name:24}{''.join(parts)}"


def table(files: dict[str, dict[str, Any]]) -> str:
    """One row for each folder; the last one is of all files."""
    folders = by_folder(files)
    everything = folders.pop("all")
    head = f"{'% that the tests run':24}" + "".join(f"{name:>9}" for name in COUNTS)
    return "\n".join([head, *(row(*each) for each in sorted(folders.items())), row("all", everything)])


def verdict(percent: float, floor: float) -> str | None:
    """What is said of too low a total, in percent of lines and branches together; None if it is high enough."""
    if round(percent, 2) >= floor:
        return None
    return (
        f"the tests run {percent:.2f} % of lines and branches together, less than the {floor:g} % of fail_under "
        "in pyproject.toml: add tests for what is new, or lower fail_under and say why in the commit"
    )


def main(part: bool) -> str | None:
    """Print the table of what was measured last in this folder; ``part``: of fewer than all tests, for any total."""
    measured = Coverage()
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        percent = measured.json_report(outfile=str(report))
        print(table(json.loads(report.read_text(encoding="utf-8"))["files"]))
    return None if part else verdict(percent, measured.get_option("report:fail_under"))


if __name__ == "__main__":
    sys.exit(main(part="--part" in sys.argv[1:]))
