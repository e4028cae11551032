"""`needs`: experiments that are run before this one, which uses their captures or weights."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from hookrun.arguments import Section
from hookrun.errors import shown

MOST_NEEDS = 16
MOST_OVERRIDES = 100
MOST_TEXT = 4_000
"""The largest number of characters of one override."""
PREVIOUS = "previous"

_NAME = re.compile(r"[^\W\d][\w-]{0,99}")
_EXPERIMENT = re.compile(r"[\w-]+(/[\w-]+)*")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text) or text == PREVIOUS:
        taken = f" ({PREVIOUS} is the run before)" if text == PREVIOUS else ""
        raise ValueError(
            f"found the name {shown(text)}{taken}, expected a letter, then letters, digits, _ or -"
        )
    return text


def _experiment(text: str) -> str:
    if not _EXPERIMENT.fullmatch(text):
        raise ValueError(f"found {shown(text)}, expected the name of an experiment, without `.yaml`")
    return text


class Need(Section):
    """An experiment that is run first, or whose finished run is reused.

    experiment: its name in the config folders
    overrides:  overrides of its configuration, as typed on a command line
    """

    experiment: Annotated[str, AfterValidator(_experiment)]
    overrides: Annotated[
        tuple[Annotated[str, Field(max_length=MOST_TEXT)], ...], Field(max_length=MOST_OVERRIDES)
    ] = ()

    def __str__(self) -> str:
        return " ".join(["experiment", self.experiment, *self.overrides])


Needs = Annotated[dict[Annotated[str, AfterValidator(_name)], Need], Field(max_length=MOST_NEEDS)]
"""Name -> experiment; ``{run: NAME}`` in a value refers to its run."""
