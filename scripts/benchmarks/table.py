"""Formats the results: as a table in the terminal, as JSON, as the table of a page, and in brief for README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measure import OURS, Result, Timing
from benchmarks.waits import Count

PICTURE = "benchmark.svg"
"""The picture beside the page."""
BEGIN, END = "<!-- benchmark -->", "<!-- end of benchmark -->"
IN_BRIEF = (
    "mlp, capture all 15 leaves",
    "mlp, clamp 7 ReLU outputs, inference",
    "mlp, scale 8 Linear outputs, inference",
    "gpt2 of 4 layers, capture the residual stream",
    "stream 1 GB under 15 ms of compute for each batch",
)
"""The rows of the main README."""


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
    rows = [("work", "relative to", "by hand", "other libraries", "hookrun", "target")]
    for result in results:
        if result.ratio is None:
            continue
        target = "" if result.target is None else f"≤ {result.target:g}"
        others = ", ".join(peers(result))
        rows.append(
            (result.work, result.base, by_hand(result), others or "–", f"**{result.ratio:.2f}**", target)
        )
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    source = f"From one run of `{command}` on {machine['machine']}, {machine['date']}, with {versions}."
    return f"{markdown(rows)}\n\n{source}"


def brief_table(results: Sequence[Result]) -> str:
    """The rows of IN_BRIEF as a Markdown table: by hand, the fastest other library, hookrun."""
    rows = [("work", "relative to", "by hand", "best other library", "hookrun")]
    for result in results:
        others = peers(result)
        if result.work in IN_BRIEF and result.ratio is not None and others:
            rows.append((result.work, result.base, by_hand(result), others[0], f"**{result.ratio:.2f}**"))
    return markdown(rows)


def by_hand(result: Result) -> str:
    """The ratios of hand-written hooks; a dash if they were not measured."""
    ratios = [f"{each.ratio:.2f}" for each in result.timings if each.name.startswith("by hand")]
    return " / ".join(ratios) or "–"


def peers(result: Result) -> list[str]:
    """The other ways with their ratios, the fastest first."""
    others = [each for each in result.timings if is_peer(each, result)]
    return [f"{each.name} {each.ratio:.2f}" for each in sorted(others, key=lambda each: each.ratio)]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The rows as a Markdown table; the first one is its head."""
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def is_peer(timing: Timing, result: Result) -> bool:
    """Whether the way is that of another library, or another way of writing a file."""
    name = timing.name
    return name not in (OURS, result.base, "bare", "compute alone") and not name.startswith(
        ("by hand", "raw ", "four in place", "one in place")
    )


def written(text: str, table: str) -> str:
    """A page's text with the table between its markers. Raises ValueError if the markers are missing."""
    start, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN} ... {END}")
    return f"{start}{BEGIN}\n{table}\n{END}{after}"


def write_readme(path: Path, table: str, picture: str) -> None:
    """Replace the table of a page and the picture above it."""
    above = f"![What hooks cost, relative to the work without them]({PICTURE})\n\n"
    (path.parent / PICTURE).write_text(picture, encoding="utf-8")
    write_table(path, above + table)


def write_table(path: Path, table: str) -> None:
    """Replace what is between the markers of a page."""
    path.write_text(written(path.read_text(encoding="utf-8"), table), encoding="utf-8")
