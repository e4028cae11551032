"""The base of the sections of a configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the configuration; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
