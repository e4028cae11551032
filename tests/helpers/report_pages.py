"""Parts of report pages, read back."""

from __future__ import annotations

import csv
import html
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hookrun.store.reader import Run


def part_of(run: Run, hook: str) -> str:
    """What the page shows of one hook."""
    page = (run.path / "report.html").read_text()
    found = re.search(rf'<section>\n<h3 id="hook-[-\d]+">{hook}<small>.*?</section>', page, re.S)
    assert found, hook
    return found[0]


def cells(part: str) -> list[list[str]]:
    """The cells of all its tables."""
    rows = re.findall(r"<tr>(<td class=\"token\">.*?)</tr>", part, re.S)
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]


def table_rows(source: str, section: str) -> list[list[str]]:
    body = source.split(f'id="{section}"')[1].split("<tbody>")[1].split("</tbody>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in body.split("</tr>") if "<td" in row]
    return [[re.sub(r"<[^>]+>|\s+", " ", cell).strip() for cell in row] for row in cells]


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def change_status(path: Path, **status: Any) -> None:
    """Change status.json of a run directory."""
    path = path / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **status}))


def ended_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def table(path: Path) -> list[dict[str, str]]:
    with (path / "sweep.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
