"""Checks every job of a sweep before the first one runs; a problem that several jobs share is reported once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hookrun import tasks
from hookrun.cli.garbage import release_memory
from hookrun.errors import CompileError, Problem, SpecError, counted, listed
from hookrun.spec import Experiment

SECONDS = 60
"""No fake run starts after this time."""

MOST_PROBLEMS = 20
MOST_JOBS = 3
"""The most further jobs that are named for one problem."""

Refused = Mapping[int, SpecError | CompileError]


def check(
    experiments: Mapping[int, Experiment],
    overrides: Sequence[Sequence[str]],
    refused: Refused,
    trust: frozenset[str],
) -> str:
    """Check the valid jobs; returns a message that says what was checked.

    experiments: job index -> experiment of each valid job
    overrides:   the overrides of every job
    refused:     job index -> error of each invalid job

    Raises SpecError, or CompileError where nothing else is wrong, with the problems of all jobs.
    """
    cache = tasks.JobCache(SECONDS)
    wrong = tasks.check_jobs(experiments, cache, trust=trust)
    release_memory()
    if all_refused := dict(sorted({**refused, **wrong}.items())):
        is_spec = any(isinstance(error, SpecError) for error in all_refused.values())
        raise (SpecError if is_spec else CompileError)(_grouped(all_refused, overrides))
    jobs = counted(len(experiments), "job")
    runs = counted(cache.proven, "fake run")
    said = f"sweep: {jobs} checked, with {runs}"
    if cache.unproven:
        said += f"; the shapes of {cache.unproven} were not checked within {SECONDS} seconds: "
        said += "those jobs check them first"
    return said


def _grouped(refused: Refused, overrides: Sequence[Sequence[str]]) -> list[Problem]:
    """Each distinct problem once, with the first job that has it."""
    jobs = dict[Problem, list[int]]()
    for number, error in refused.items():
        for problem in error.errors:
            jobs.setdefault(problem, []).append(number)
    common = set(overrides[0]).intersection(*overrides)
    problems = list[Problem]()
    for problem, (first, *others) in list(jobs.items())[:MOST_PROBLEMS]:
        where = f"job {_named(first, overrides[first])}"
        alike = [_named(n, [text for text in overrides[n] if text not in common]) for n in others]
        also = f"; the same in {listed(alike, MOST_JOBS)}" if alike else ""
        problems.append(
            Problem(
                f"{where}: {problem.where}" if problem.where else where, problem.what + also, problem.hint
            )
        )
    if (beyond := len(jobs) - MOST_PROBLEMS) > 0:
        of_all = f"{len(refused)} of {len(overrides)} jobs are refused"
        problems.append(Problem("", f"{counted(beyond, 'more problem')}; {of_all}"))
    return problems


def _named(number: int, overrides: Sequence[str]) -> str:
    return f"#{number} ({' '.join(overrides)})" if overrides else f"#{number}"
