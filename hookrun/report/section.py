"""The class of a section of a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

F = TypeVar("F")


@dataclass(frozen=True)
class ReportSection(Generic[F]):
    """One part of a page: a Python file in `sections/`, with its template beside it.

    id:       the section's anchor in the page
    title:    its entry in the navigation; "" for a notice without an entry
    build:    facts of the run or the sweep -> `data` of the template; None leaves the section out
    template: a file in `sections/`, which may use `section`, `data`, `facts` and the macros of parts.html
    """

    id: str
    title: str
    build: Callable[[F], Any | None]
    template: str
