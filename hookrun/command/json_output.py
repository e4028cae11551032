"""`--json`: a command prints one object on stdout, and nothing else. What it prints otherwise goes to stderr."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from hookrun.command.outcome import Outcome
from hookrun.command.sweeps.exit_codes import exit_code, report
from hookrun.errors import HookrunError, spec_error
from hookrun.run.ranks import is_main
from hookrun.terminal import Guarded, notes_kept

if TYPE_CHECKING:
    from hookrun.run.experiment.task import Ready

FLAG = "--json"
FULL = "--json=full"
_MOST_KEPT = 2**20
"""Characters of what is printed that are kept for the object."""

Command = Callable[[list[str], Outcome], int]
"""Carries out words of a command line, and fills the outcome; returns the exit code."""


def answered(argv: Sequence[str] | None, command: Command) -> int:
    """Carry out a command. With `--json` or `--json=full` among the words, print the object that says what it did.

    argv: the words of the command line; None: those of the process
    """
    words = list(sys.argv[1:] if argv is None else argv)
    typed = list(takewhile(lambda word: word != "--", words))
    flags = [word for word in typed if word.partition("=")[0] == FLAG]
    if not flags:
        return command(words, Outcome())
    others = [word for word in typed if word not in flags] + words[len(typed) :]
    outcome = JsonOutcome()
    with _printing_apart() as (out, printed), notes_kept() as notes:
        try:
            if wrong := [flag for flag in flags if flag not in (FLAG, FULL)]:
                raise spec_error(wrong[0], "is not a flag", f"write {FLAG}, or {FULL}, which cuts no list")
            code = command(others, outcome)
        except SystemExit as stop:  # argparse has printed why
            code = stop.code if isinstance(stop.code, int) else 2
        except (Exception, KeyboardInterrupt) as error:
            outcome.errors.append(error)
            report(error)
            code = exit_code(error)
        said = _said(outcome, code, notes, printed)
    if is_main() and out is not None:
        from hookrun.command.json_cut import written

        out = cast(TextIO, Guarded(out))
        out.write(f"{written(said, full=FULL in flags)}\n")
        out.flush()
    return code


class JsonOutcome(Outcome):
    """An outcome that keeps what was shown as data, and no model."""

    def show(self, overrides: Sequence[str], ready: Ready) -> None:
        """Keep what was shown for a job with these overrides; a single run has none."""
        data = ready.task.as_data(ready)
        if overrides:
            jobs = self.told.setdefault("jobs", [])
            jobs.append({"job": str(len(jobs)), "overrides": list(overrides), **data})
        else:
            self.told |= data


class Parser(argparse.ArgumentParser):
    """The parser of a command's words; why they are wrong is printed, and kept in the outcome."""

    def __init__(self, outcome: Outcome, **options: Any) -> None:
        super().__init__(**options)
        self._outcome = outcome

    def error(self, message: str) -> NoReturn:
        """Print the message below the usage, and raise SystemExit."""
        self._outcome.errors.append(HookrunError(message))
        super().error(message)


# ---- what is printed -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Kept(Guarded):
    """A stream of which the beginning is kept."""

    kept: StringIO = field(default_factory=StringIO)

    def write(self, text: str) -> int:
        """Write the text, and keep it while there is not much."""
        if self.kept.tell() < _MOST_KEPT:
            self.kept.write(text)
        return super().write(text)


@contextmanager
def _printing_apart() -> Iterator[tuple[TextIO | None, StringIO]]:
    """In the block everything is printed on stderr. Gives stdout, and what is printed in its place."""
    out = sys.stdout
    with open(os.devnull, "w") as nowhere:
        error = sys.stderr or nowhere
        printed = _Kept(error)
        with (
            _descriptor_apart(out, error),
            redirect_stdout(cast(TextIO, printed)),
            redirect_stderr(cast(TextIO, Guarded(error))),
        ):
            yield out, printed.kept


@contextmanager
def _descriptor_apart(out: TextIO | None, error: TextIO) -> Iterator[None]:
    """In the block the file descriptor 1 is that of stderr: for C libraries, and for processes that are started."""
    copy = None
    with suppress(OSError, ValueError, AttributeError):  # there is none, or it is a stream in memory
        if out is not None and out.fileno() == 1:
            out.flush()
            target = error.fileno()
            copy = os.dup(1)
            os.dup2(target, 1)
    try:
        yield
    finally:
        if copy is not None:
            Guarded(cast(TextIO, out)).flush()  # what was printed past `sys.stdout`
            import ctypes  # takes longer than all else here

            ctypes.CDLL(None).fflush(None)
            os.dup2(copy, 1)
            os.close(copy)


# ---- what is said --------------------------------------------------------------------------------------------------


def _said(outcome: Outcome, code: int, notes: Sequence[str], printed: StringIO) -> dict[str, Any]:
    """The object."""
    from hookrun.command.mistakes import mistakes_of

    said = dict(outcome.told)
    notes = [*said.pop("notes", []), *notes]
    for read, folder in ((_of_run, outcome.run_dir), (_of_sweep, outcome.sweep_dir)):
        if folder is not None and folder.is_dir():
            try:
                for part in read(folder):
                    said |= part
            except HookrunError as error:  # it was damaged, or has names that are too long
                notes.append(str(error))
    if not said and code == 0:
        said["text"] = printed.getvalue()
    if code != 0:
        errors = outcome.errors or _reasons(said)
        errors = errors or [HookrunError(f"ended with exit code {code}; stderr says why")]
        said["mistakes"] = [mistake for error in errors for mistake in mistakes_of(error)]
    return {"version": 1, "ok": code == 0, "exit": code, **said, "notes": list(dict.fromkeys(notes))}


def _reasons(said: Mapping[str, Any]) -> list[BaseException]:
    """Why the run, or each job of a sweep, did not end well, as its directory says."""
    reasons = [said["reason"]] if said.get("reason") else []
    for job in said.get("jobs", []):
        if job["status"] != "done":
            reasons.append(f"job {job['job']}: {job['reason'] or job['status']}")
    return [HookrunError(reason) for reason in reasons]


def _of_run(folder: Path) -> Iterator[dict[str, Any]]:
    """How a run ended, then what its hooks did, and its answer. StoreError if a file of it is damaged."""
    from hookrun.command.sweeps.jobs import near_path
    from hookrun.engine.runtime.install import describe_inactive
    from hookrun.store.captures.read import captured_tensors
    from hookrun.store.format import FOLDS
    from hookrun.store.reader import open_run
    from hookrun.store.scores import last_metrics
    from hookrun.store.studies import answer_of

    run = open_run(folder)
    status = run.status["status"]
    reason = run.status.get("reason") or ""
    metrics = last_metrics(run.metrics)
    yield {"run": near_path(folder), "status": status, "reason": reason, "metrics": metrics}
    fired: dict[str, dict[str, int]] = {}
    sites = run.hooks.get("sites", [])
    for site in sites:
        fired.setdefault(site["hook"], {})[site["module"]] = site["fired"]
    captures: dict[str, dict[str, Any]] = {}
    for captured in captured_tensors(run.captures):
        place = f"{captured.module} {captured.path}".rstrip()
        shape = {"shape": list(captured.shape), "dtype": str(captured.dtype).removeprefix("torch.")}
        captures.setdefault(captured.hook, {})[place] = shape
    silent = [(site["hook"], site["module"], site["silent"]) for site in sites if site.get("silent")]
    warnings = describe_inactive(silent) if status in ("done", "stopped") else []
    yield {"fired": fired, "captures": captures, "warnings": warnings, "answer": answer_of(run)}
    if os.path.isfile(folder / FOLDS):
        yield {"folds": near_path(folder / FOLDS)}


def _of_sweep(folder: Path) -> Iterator[dict[str, Any]]:
    """What the directory of a sweep says. StoreError if it holds no run."""
    from hookrun.command.sweeps.jobs import near_path
    from hookrun.report.sweep_facts import TAGS, answer_of_sweep, read_sweep

    facts = read_sweep(folder)
    jobs: list[dict[str, Any]] = []
    for job in facts.jobs:
        texts = [f"{key}={value}" for key, value in job.overrides.items() if key != TAGS]
        jobs.append(
            {
                "job": job.name,
                "overrides": texts,
                "run": near_path(folder / job.name),
                "status": job.status,
                "reason": job.reason,
                "exit": job.exit_code,
                "objective": job.value,
                "metrics": job.metrics,
            }
        )
    yield {"sweep": near_path(folder), "jobs": jobs, "answer": answer_of_sweep(facts)}
