"""The main facts of a run; unknown ones are left out."""

from __future__ import annotations

from pathlib import Path

from hookrun.report.facts import Facts
from hookrun.report.sections.summary import SECTION
from hookrun.store.records import EnvRecord, PlanRecord

STATUS = {
    "status": "done",
    "started": "2026-01-01T00:00:00+00:00",
    "ended": "2026-01-01T00:03:20+00:00",
    "exit_code": 0,
}


def test_the_facts_of_a_run() -> None:
    facts = Facts(
        Path("/runs/a"),
        STATUS,
        plan=PlanRecord(hash="0123456789abcdef", model="ResNet"),
        env=EnvRecord(torch="2.9", python="3.12", device="cpu", threads=1, cpu_count=2),
        config={
            "task": {"name": "train"},
            "model": {"name": "resnet18"},
            "data": {"name": "digits"},
            "seed": 0,
        },
    )
    assert dict(SECTION.build(facts) or []) == {
        "task": "train", "model": "resnet18 (ResNet)", "data": "digits", "started": "2026-01-01 00:00 UTC",
        "duration": "3 min 20 s", "seed": "0", "device": "cpu, 1 thread of 2 cores",
        "versions": "torch 2.9, python 3.12", "plan": "0123456789ab", "exit code": "0", "directory": "/runs/a",
    }  # fmt: skip


def test_unknown_facts_are_left_out_and_an_analysis_names_its_run() -> None:
    facts = Facts(
        Path("a"), {"status": "running"}, config={"task": {"name": "probe", "run": "/runs/b"}, "seed": "x"}
    )
    assert dict(SECTION.build(facts) or []) == {
        "task": "probe", "of the run": "/runs/b", "started": "–", "directory": "a",
    }  # fmt: skip
    assert "duration" not in dict(
        SECTION.build(Facts(Path("a"), STATUS, cut_off="its process is gone")) or []
    )
