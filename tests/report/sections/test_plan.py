"""The plan as a table, with what fired and what was changed."""

from __future__ import annotations

from pathlib import Path

from report_pages import table_rows


def test_the_plan_counts_what_fired_and_what_was_changed(observed: Path, page) -> None:
    rows = {cells[1]: cells for cells in table_rows(page(observed).source, "plan")}
    assert list(rows) == ["norms", "spread", "seen", "gradient", "halved", "said", "late"]
    assert (rows["halved"][3:7], rows["halved"][-2:]) == (
        ["Linear", "forward", "scale", "factor=0.5"],
        ["36", "100.0 %"],
    )
    assert rows["norms"][-2] == str(6 * 18) and "and 2 more" in rows["norms"][2]
    assert rows["late"][-2] == "0" and rows["late"][7] == "epoch start 99"
