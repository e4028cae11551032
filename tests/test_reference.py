"""The pages' tables equal those generated from the code, and what a mistake prints is the text in tests/golden."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from golden import COMMAND, GOLDEN, blocks, repeated
from reference import PAGES, updated

ROOT = Path(__file__).parents[1]


def test_the_pages_are_current() -> None:
    for name, tables in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert updated(text, tables) == text, f"{name}: run scripts/reference"


def test_a_stale_table_is_replaced_and_the_text_around_it_stays() -> None:
    text = (ROOT / "conf/README.md").read_text(encoding="utf-8")
    stale = text.replace("| `forward` |", "| `forwards` |")
    assert stale != text
    assert updated(stale) == text


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="reference: hook types"):
        updated("# a readme")


def test_every_link_of_a_page_has_an_existing_target() -> None:
    broken = []
    for page in sorted(ROOT.glob("**/*.md")):
        if any(part.startswith(".venv") or part in ("outputs", "multirun") for part in page.parts):
            continue
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, heading = target.partition("#")
            if "://" in name:
                continue
            found = page.parent / name if name else page
            if not found.exists() or (heading and heading not in _anchors(found)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


BLOCKS = [(path.stem, block) for path in sorted(GOLDEN.glob("*.txt")) for block in blocks(path)]


@pytest.mark.parametrize(
    "block",
    [block for _, block in BLOCKS],
    ids=[f"{name}: {block.partition(COMMAND)[2].partition(chr(10))[0]}" for name, block in BLOCKS],
)
def test_a_mistake_is_told_in_these_words(block: str) -> None:
    assert repeated(block) == block, "if the new text is right, run scripts/reference"
    assert block.endswith("exit code 2\n")
