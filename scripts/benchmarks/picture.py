"""Draws the results as an SVG for the README: a dot for each way on an axis of ratios, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.measure import Result
from benchmarks.table import is_peer

WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM = 860, 26, 330, 40, 46, 34
_TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)
_STYLE = """
  svg { font: 13px system-ui, sans-serif; background: #fff }
  text { fill: #24292f } .quiet { fill: #57606a } line { stroke: #d0d7de }
  .ours { fill: #0969da } .hand { fill: none; stroke: #24292f; stroke-width: 1.5 } .peer { fill: #b08800 }
  .target { stroke: #1a7f37; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117 } text { fill: #e6edf3 } .quiet { fill: #8b949e } line { stroke: #30363d }
    .ours { fill: #58a6ff } .hand { stroke: #e6edf3 } .peer { fill: #d29922 } .target { stroke: #3fb950 }
  }"""


def picture(results: Sequence[Result]) -> str:
    """An SVG with a row for each result that has a ratio: hookrun, the first way by hand, the best other library."""
    shown = [(result, _marks(result)) for result in results if result.ratio is not None]
    most = max([1.5, *(max(marks.values()) for _, marks in shown)])
    height = TOP + ROW * len(shown) + BOTTOM

    def across(ratio: float) -> float:
        """The x coordinate of a ratio on the logarithmic axis; ratios below 0.8 are at its left edge."""
        share = math.log(max(ratio, 0.8) / 0.8) / math.log(most * 1.1 / 0.8)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d">',
        '<title id="t">What hooks cost, relative to the work without them</title>',
        f'<desc id="d">{escape(_description(shown))}</desc><style>{_STYLE}\n</style>',
        *_legend(),
    ]
    for tick in (tick for tick in _TICKS if tick <= most * 1.1):
        x, bottom = across(tick), height - BOTTOM
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        text = f'<text class="quiet" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g} ×</text>'
        lines.append(text)
    for number, (result, marks) in enumerate(shown):
        y = TOP + ROW * number + ROW / 2
        lines.append(
            f'<text x="{LEFT - 14}" y="{y + 4:.1f}" text-anchor="end">{escape(_short(result.work))}</text>'
        )
        lines += [_drawn(kind, across(ratio), y) for kind, ratio in marks.items()]
    return "\n".join([*lines, "</svg>", ""])


def _marks(result: Result) -> dict[str, float]:
    """kind -> ratio of the marks in a row, in drawing order: later marks cover earlier ones."""
    peers = [each.ratio for each in result.timings if is_peer(each, result)]
    hand = [each.ratio for each in result.timings if each.name.startswith("by hand")]
    marks = {"target": result.target} | {"peer": min(peers, default=None), "hand": next(iter(hand), None)}
    return {kind: ratio for kind, ratio in {**marks, "ours": result.ratio}.items() if ratio is not None}


def _drawn(kind: str, x: float, y: float) -> str:
    if kind == "target":
        return f'<line class="target" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8:.1f}" y2="{y + 8:.1f}"/>'
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'


def _legend() -> list[str]:
    names = {"ours": "hookrun", "hand": "hooks by hand", "peer": "best other library", "target": "target"}
    lines = []
    for number, (kind, name) in enumerate(names.items()):
        x = LEFT + 140 * number
        lines += [_drawn(kind, x, 18), f'<text x="{x + 10}" y="22">{name}</text>']
    return lines


def _short(work: str, most: int = 42) -> str:
    return work if len(work) <= most else work[: most - 1].rstrip(" ,") + "…"


def _description(shown: Sequence[tuple[Result, Mapping[str, float]]]) -> str:
    """The picture as text, for screen readers."""
    names = {"ours": "hookrun", "hand": "by hand", "peer": "best other library", "target": "target"}
    return " ".join(
        f"{result.work}: " + ", ".join(f"{names[kind]} {ratio:.2f}" for kind, ratio in marks.items()) + "."
        for result, marks in shown
    )
