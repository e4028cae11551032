"""The mistakes behind an error as plain data, for programs: where, what, found, near, fix."""

from __future__ import annotations

import json
from typing import Any

from hookrun.errors import Fix, HookrunError, Problem, Refusal, reason, shown

Mistake = dict[str, Any]

MOST_OF_A_VALUE = 1_000
"""Characters of JSON that a value may have; a longer one is shortened where it was found, and is not in a fix."""


def mistakes_of(error: BaseException) -> list[Mistake]:
    """One mapping for each mistake that the error lists; an error of another kind is one mistake.

    where: the key path, the flag or the words typed; None where nothing of the configuration is wrong
    what:  the sentence that a person reads, and the next step after it
    found: the wrong value or name; None if it is not known
    near:  the nearest names that there are, the nearest first
    fix:   None, or a mapping with `key`, and `value` unless `key` is to be taken away: take away what stands at
           `where`, then set `key` to `value`, which is true for a flag that takes no value
    """
    if isinstance(error, Refusal):
        return [_mistake(problem) for problem in error.errors]
    what = str(error) if isinstance(error, HookrunError) else reason(error)
    return [_mistake(Problem("", what))]


def _mistake(problem: Problem) -> Mistake:
    what = problem.what
    if problem.place and problem.where and problem.place != problem.where:
        what = f"{problem.where}: {what}"  # a file, or the job of a sweep
    if problem.hint:
        what = f"{what}; {problem.hint}"
    return {
        "where": problem.place or problem.where or None,
        "what": what,
        "found": problem.found if _is_plain(problem.found) else shown(problem.found),
        "near": list(problem.near),
        "fix": None if problem.fix is None else _fix(problem.fix),
    }


def _fix(fix: Fix) -> Mistake | None:
    if fix.takes_away:
        return {"key": fix.key}
    return {"key": fix.key, "value": fix.value} if _is_plain(fix.value) else None


def _is_plain(value: Any) -> bool:
    """Whether the value is one of JSON, and not too long. NaN and infinity are not."""
    try:
        return len(json.dumps(value, allow_nan=False)) <= MOST_OF_A_VALUE
    except (TypeError, ValueError, RecursionError):
        return False
