"""The table of the jobs."""

from __future__ import annotations

from pathlib import Path

from report_pages import table


def test_the_page_links_to_the_page_of_each_job(sweep: Path, page) -> None:
    links = [link for link in page(sweep).links if link.startswith("./")]
    best_first = sorted(table(sweep), key=lambda row: -float(row["objective"]))
    assert links == [f"./{row['job']}/report.html" for row in best_first]
    assert all((sweep / link).is_file() for link in links)
