"""What share of the package the tests run: lines and branches, by folder. See scripts/coverage."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import PurePath
from typing import Any

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


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(table(json.load(file)["files"]))
