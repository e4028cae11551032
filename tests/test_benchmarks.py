"""scripts/bench measures, compares results and writes its table; no test depends on how long anything takes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.measure import OURS, OtherOutputs, Settings, Ways, judged, measured
from benchmarks.picture import picture
from benchmarks.table import BEGIN, END, IN_BRIEF, PICTURE, brief_table, readme_table, written
from benchmarks.works import of_subject

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "scripts/benchmarks/README.md"
MACHINE = {"machine": "2 cores", "date": "2026-11-22", "versions": {"torch": "2.15.0", "zarr": None}}


def test_a_subject_is_measured_printed_and_written(tmp_path, capsys) -> None:
    out, readme = tmp_path / "bench.json", tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = ["--rounds", "1", "--seconds", "0", "--json", str(out), "--readme", str(readme)]
    assert main(["selectors", *arguments]) == 0
    assert "100 selectors against 5,002 modules" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    assert row["timings"][1]["name"] == OURS
    assert row["reached"] == (row["ratio"] <= row["target"])
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "`scripts/bench selectors --rounds 1 --seconds 0`" in text and "100 selectors" in text
    drawn = ElementTree.fromstring((tmp_path / PICTURE).read_text())
    assert f"({PICTURE})" in text and "100 selectors" in str(drawn.findtext("{*}desc"))


def test_the_picture_has_every_variant_of_a_row() -> None:
    result = judged("a < b", {"bare": [1.0], "by hand": [1.25], OURS: [1.5], "other": [3.0]}, target=1.4)
    drawn = ElementTree.fromstring(picture([result, judged("no ratio", {"bare": [1.0]}, target=None)]))
    assert (
        drawn.findtext("{*}desc")
        == "a < b: target 1.40, best other library 3.00, by hand 1.25, hookrun 1.50."
    )
    places = {each.get("class"): float(each.get("cx", "0")) for each in drawn.findall("{*}circle")[3:]}
    assert places["hand"] < places["ours"] < places["peer"]


def test_captures_of_the_small_network_equal_those_of_hand_written_hooks(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--row", "capture_mlp", "--row", "clamp_mlp", "--rounds", "1", "--seconds", "0"]
    assert main(["hooks", *arguments, "--json", str(out)]) == 0
    capture, clamp = json.loads(out.read_text())["rows"]
    assert capture["compared"] == ["by hand, cloned", OURS]
    assert clamp["compared"] == ["by hand", OURS]


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    result = judged("work", {"bare": [1.0, 2.0, 4.0], OURS: [1.5, 2.0, 8.0]}, target=1.5)
    assert [each.ratio for each in result.timings] == [1.0, 1.5]
    assert result.reached is True
    assert judged("work", {"bare": [1.0], OURS: [1.6]}, target=1.5).reached is False


def test_other_outputs_are_an_error_for_hookrun_and_leave_out_another_library() -> None:
    def ways(**values: float) -> Ways:
        found = Ways()
        for name, value in values.items():
            found.add(name, lambda: None, lambda value=value: {"y": torch.tensor(value)})
        return found

    with pytest.raises(OtherOutputs, match="hookrun against hand: y"):
        measured("work", ways(hand=1.0, hookrun=2.0), Settings(1, 0), target=None)
    result = measured("work", ways(hand=1.0, peer=2.0, hookrun=1.0), Settings(1, 0), target=None)
    assert result.compared == ("hand", OURS)
    assert "other values than hand" in result.missing["peer"]


def test_a_library_that_is_missing_or_fails_is_named() -> None:
    ways = Ways()
    ways.peer("gone", "no_such_package", lambda: pytest.fail("never made"))
    ways.peer("broken", "json", lambda: 1 / 0)
    assert ways.missing == {"gone": "not installed", "broken": "ZeroDivisionError: division by zero"}


def test_the_page_has_the_markers_of_the_table() -> None:
    result = judged("a work", {"bare": [1.0], "by hand": [1.25], OURS: [1.5], "other": [3.0]}, target=1.4)
    table = readme_table("scripts/bench all", MACHINE, [result])
    assert "| a work | bare | 1.25 | other 3.00 | **1.50** | ≤ 1.4 |" in table
    assert "torch 2.15.0." in table and "zarr" not in table
    assert table in written(PAGE.read_text(encoding="utf-8"), table)
    with pytest.raises(ValueError, match="benchmark"):
        written("# a readme", table)


def test_a_row_in_brief_has_the_fastest_other_library() -> None:
    times = {"bare": [1.0], "by hand": [1.25], OURS: [1.5], "slow": [4.0], "fast": [3.0]}
    (name, *_) = IN_BRIEF
    table = brief_table([judged(name, times, target=1.4), judged("not in brief", times, target=1.4)])
    head, _, *rows = table.splitlines()
    assert head == "| work | relative to | by hand | best other library | hookrun |"
    assert rows == [f"| {name} | bare | 1.25 | fast 3.00 | **1.50** |"]


def test_the_rows_of_the_readme_are_those_of_the_page() -> None:
    table = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    measured_rows = {
        cells[0]: cells for cells in map(cells_of, PAGE.read_text(encoding="utf-8").splitlines())
    }
    brief = [cells_of(line) for line in table.strip().splitlines()[2:]]
    assert sorted(row[0] for row in brief) == sorted(IN_BRIEF)
    for work, base, by_hand, best, ours in brief:
        peers = measured_rows[work][3].split(", ")
        assert measured_rows[work][1:5] == [base, by_hand, ", ".join(peers), ours]
        assert best == peers[0]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the machine has an accelerator")
def test_rows_of_a_gpu_say_that_there_is_none(tmp_path: Path, capsys) -> None:
    out = tmp_path / "bench.json"
    assert main(["device", "--row", "stats_in_training", "--json", str(out)]) == 0
    assert "missing: this machine has no GPU" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    assert row["reached"] is None and row["target"] == 1.01


def test_all_subjects_together_leave_out_the_device() -> None:
    assert not any("device" in work.subjects for work in of_subject("all"))
    assert len(list(of_subject("device"))) == 3
