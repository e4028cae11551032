"""The tensors of an action that come from a file or from what another run captured.

`sources` defines the kinds of value, `read` reads one from a file or a run, `runs` finds the named runs, and
`other_run` says how they differ from the run that uses them.
"""

from __future__ import annotations

from hookrun.run_values.other_run import UsedBy, differences, padded_otherwise, with_origins
from hookrun.run_values.read import read_value
from hookrun.run_values.runs import FoundRuns, UsedRun, other_runs, used_run, used_runs, with_found_weights
from hookrun.run_values.sources import NotYetRun, Rows, Source

__all__ = [
    "FoundRuns",
    "NotYetRun",
    "Rows",
    "Source",
    "UsedBy",
    "UsedRun",
    "differences",
    "other_runs",
    "padded_otherwise",
    "read_value",
    "used_run",
    "used_runs",
    "with_found_weights",
    "with_origins",
]
