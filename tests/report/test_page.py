"""A page is one file that loads nothing and runs no code from a run directory."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import hookrun
from hookrun.report import write_report


def test_every_figure_has_a_caption_its_numbers_and_a_button(observed: Path, page) -> None:
    source = page(observed).source
    figures = re.findall(r"<figure.*?</figure>", source, re.S)
    assert len(figures) > 15
    for figure in figures:
        assert re.search(r'role="img"[^>]* aria-label="[^"]{20,}"', figure)
        assert "data-save=" in figure and "<details><summary>the numbers" in figure
    accuracy = next(figure for figure in figures if "<span>accuracy</span>" in figure)
    last = hookrun.open_run(observed).metrics[-1]["accuracy"]
    assert "val: " in accuracy and f'<td class="token">{last:.4g}</td>' in accuracy


def test_it_makes_no_network_request(observed: Path, page) -> None:
    found = page(observed)
    assert found.links and all(link.startswith(("#", "data:")) for link in found.links)
    assert not re.search(r"@import|url\(|<link|\bsrc=[\"']?http", found.source)


def test_names_are_escaped(observed: Path, tmp_path: Path, page) -> None:
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    for name in ("plan.json", "model.json", "hooks.json", "stats.jsonl", "status.json", "env.json"):
        file = path / name
        text = file.read_text().replace("layers.1", r"<img src=x onerror=alert(1)>\u202e</script>\n&amp;")
        file.write_text(text.replace('"done"', r'"</b><script>alert(1)</script>"'))
    write_report(path)
    found = page(path)
    assert "<script>alert" not in found.source and "onerror" not in found.links
    assert found.tags.count("script") == 1 and "\u202e" not in found.source
    assert "<img src=x onerror=alert(1)>" in found.text
