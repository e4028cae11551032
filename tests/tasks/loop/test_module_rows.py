"""The module tree as lines of text: its depth, its width, marks, and what is left out."""

from __future__ import annotations

from hookrun.plan.plan import Match
from hookrun.tasks.loop.module_rows import fitting_depth, module_rows

PATHS = ["", "a", "a.0", "a.0.x", "a.1", "b"]
TREE = [Match(path, (path, "c") if path == "b" else (path,), "Linear", 1200) for path in PATHS]


def test_the_whole_tree() -> None:
    rows = module_rows(TREE, ["b"], depth=None, width=None, plain=True)
    assert rows.hidden == 0
    assert rows.lines == [
        "(root)         Linear  1,200  -",
        "|-- a          Linear  1,200  -",
        "|   |-- 0      Linear  1,200  -",
        "|   |   `-- x  Linear  1,200  -",
        "|   `-- 1      Linear  1,200  -",
        "`-- * b        Linear  1,200  -  (also c)",
    ]


def test_deeper_modules_are_counted_except_for_the_marked_ones() -> None:
    rows = module_rows(TREE, [], depth=1, width=None, plain=False)
    assert rows.hidden == 3 and [line.split()[1] for line in rows.lines[1:]] == ["a", "b"]
    assert rows.lines[1].endswith("(+3 below)") and rows.lines[1].startswith("├── a")
    marked = module_rows(TREE, ["a.0.x"], depth=1, width=None, plain=False)
    assert marked.hidden == 1 and marked.lines[3].startswith("│       └── * x")


def test_lines_are_cut_at_the_width_and_levels_at_the_height() -> None:
    lines = module_rows(TREE, [], depth=None, width=12, plain=True).lines
    assert all(len(line) == 12 and line.endswith("…") for line in lines)
    assert [fitting_depth(TREE, height) for height in (1, 3, 5, 6)] == [1, 1, 2, 3]
