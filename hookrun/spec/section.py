"""The base of the sections of a configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the configuration; an unknown key is an error.

    Importing builds no validators, which takes milliseconds for each class: `defer_build`, and defaults that are
    made with `model_construct`, which does not validate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
