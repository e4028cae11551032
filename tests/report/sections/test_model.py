"""The model's tree, marked where hooks are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hookrun.report.facts import Facts
from hookrun.report.sections import model
from hookrun.store.records import ModelRecord


def test_the_tree_marks_hooked_modules_with_their_counts(observed: Path, page) -> None:
    tree = page(observed).source.split('id="tree"')[1].split("<h2")[0]
    lines = [
        re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", line)).strip()
        for line in re.findall(r"<li><div>(.*?)</div>", tree, re.S)
    ]
    assert lines[0] == "(root) MLP 8,970"
    [fc] = [line for line in lines if line.startswith("fc ")]
    assert (
        fc.startswith("fc Linear 650 [2, 10]") and "halved ×36" in fc and "norms weight ×18, bias ×18" in fc
    )
    [flatten] = [line for line in lines if "flatten" in line]
    assert "×" not in flatten
    assert '<span class="mark silent" title="never fired">late ×0</span>' in tree


def test_the_tree_is_nested_as_the_model_is(observed: Path, page) -> None:
    tree = page(observed).source.split('id="tree"')[1].split("<h2")[0]
    depth, found = 0, dict[str, int]()
    for closes, opens, name in re.findall(r"(</ul>)|(<ul>)|<li><div><span[^>]*>([^<]*)<", tree):
        depth += bool(opens) - bool(closes)
        if name:
            found[name] = depth
    assert found == {"(root)": 0, "flatten": 1, "layers": 1, "0": 2, "1": 2, "2": 2, "3": 2, "fc": 1}


def test_a_tree_as_deep_as_it_may_be_and_with_gaps() -> None:
    """Modules below the deepest level are shown on it; one whose parent is missing is shown under the next ancestor."""
    paths = ["", *(".".join(["m"] * level) for level in range(1, 301)), "gone.child"]
    modules = [{"path": path, "names": [path], "class": "M", "parameters": 0} for path in paths]
    shown = model.SECTION.build(Facts(Path(), {}, model=ModelRecord.model_validate({"modules": modules})))
    assert [child.name for child in shown["root"].children] == ["m", "child"]
    depth, count, level = 0, 0, [shown["root"]]
    while level:
        depth, count = depth + 1, count + len(level)
        level = [child for node in level for child in node.children]
    assert (depth, count) == (model.DEEPEST + 2, len(paths))


def test_a_large_tree_is_folded_to_forty_rows() -> None:
    paths = ["", *(f"h.{n}" for n in range(30)), *(f"h.{n}.mlp" for n in range(30)), "h"]
    modules = [{"path": path, "names": [path], "class": "M", "parameters": 0} for path in sorted(paths)]

    def rows(node: Any) -> int:
        return 1 + (sum(map(rows, node.children)) if node.opened else 0)

    shown = model.SECTION.build(Facts(Path(), {}, model=ModelRecord.model_validate({"modules": modules})))
    assert shown["folds"] and rows(shown["root"]) <= 40 < shown["modules"]
