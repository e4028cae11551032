"""Columns as a pandas DataFrame or an Arrow table, libraries that hookrun does not need for anything else."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

from hookrun.errors import HookrunError, reason


def as_table(columns: Mapping[str, list[Any]], form: Literal["pandas", "arrow"]) -> Any:
    """A pandas DataFrame or an Arrow table.

    HookrunError if the library is not installed, or has no type for a column.
    """
    library = installed("pyarrow" if form == "arrow" else form)
    try:
        return library.DataFrame(columns) if form == "pandas" else library.table(columns)
    except (TypeError, ValueError, OverflowError) as error:
        # a stranger's record may have texts beside numbers
        raise HookrunError(f"a column cannot be written as {form}: {reason(error)}") from error


def installed(library: str, module: str | None = None) -> Any:
    """A library, or one of its modules. HookrunError if it is not installed."""
    if importlib.util.find_spec(library) is None:
        raise HookrunError(f"{library} is not installed: pip install {library}")
    return importlib.import_module(module or library)
