"""Formats the results: as a table in the terminal, as JSON, and as the table of the README."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measure import OURS, Result, Timing
from benchmarks.waits import Count

PICTURE = ".github/benchmark.svg"
BEGIN, END = "<!-- benchmark -->", "<!-- end of benchmark -->"


def shown(result: Result) -> str:
    """One result as text, with a line for each way."""
    target = "" if result.target is None else f"    target: ≤ {result.target:g}"
    verdict = {True: ", reached", False: ", missed", None: ""}[result.reached]
    lines = [f"{result.work}{target}{verdict}"]
    width = max([28, *(len(each.name) for each in result.timings)])
    for each in result.timings:
        mark = " (1)" if each.name == result.base else ""
        lines.append(f"  {each.name:<{width}}{seconds(each.seconds):>12}{each.ratio:>10.3f}{mark}")
    lines += [f"  {name:<{width}}     missing: {why}" for name, why in result.missing.items()]
    return "\n".join(lines)


def seconds(value: float) -> str:
    """A time in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value * 1e6:.1f} µs"


def as_json(
    command: str, machine: Mapping[str, Any], results: Sequence[Result], counts: Sequence[Count] = ()
) -> str:
    """All measurements as JSON. counts: what was counted on the second device."""
    rows = [{**asdict(each), "ratio": each.ratio, "reached": each.reached} for each in results]
    counted = {"waits": [asdict(each) for each in counts]} if counts else {}
    return (
        json.dumps({"command": command, **machine, "rows": rows, **counted}, indent=1, ensure_ascii=False)
        + "\n"
    )


def readme_table(command: str, machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The ratios as a Markdown table: by hand, other libraries, hookrun, target; then machine and versions."""
    head = ("work", "relative to", "by hand", "other libraries", "hookrun", "target")
    rows = [head, tuple("---" for _ in head)]
    for result in results:
        if result.ratio is None:
            continue
        target = "" if result.target is None else f"≤ {result.target:g}"
        others = [each for each in result.timings if is_peer(each, result)]
        hand = " / ".join(f"{each.ratio:.2f}" for each in result.timings if each.name.startswith("by hand"))
        peers = ", ".join(
            f"{each.name} {each.ratio:.2f}" for each in sorted(others, key=lambda each: each.ratio)
        )
        rows.append((result.work, result.base, hand or "–", peers or "–", f"**{result.ratio:.2f}**", target))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    lines += ["", f"From one run of `{command}` on {machine['machine']}, {machine['date']}, with {versions}."]
    return "\n".join(lines)


def is_peer(timing: Timing, result: Result) -> bool:
    """Whether the way is that of another library, or another way of writing a file."""
    name = timing.name
    return name not in (OURS, result.base, "bare", "compute alone") and not name.startswith(
        ("by hand", "raw ", "four in place", "one in place")
    )


def written(text: str, table: str) -> str:
    """A README text with the table between its markers. Raises ValueError if the markers are missing."""
    start, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN} ... {END}")
    return f"{start}{BEGIN}\n{table}\n{END}{after}"


def write_readme(path: Path, table: str, picture: str) -> None:
    """Replace the table of a README and the picture above it."""
    above = f"![What hooks cost, relative to the work without them]({PICTURE})\n\n"
    (path.parent / PICTURE).parent.mkdir(exist_ok=True)
    (path.parent / PICTURE).write_text(picture, encoding="utf-8")
    path.write_text(written(path.read_text(encoding="utf-8"), above + table), encoding="utf-8")
