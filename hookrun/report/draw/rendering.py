"""The templates of pictures, which are beside this file; texts in them are escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hookrun.errors import printable

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
)
_ENVIRONMENT.filters["name"] = printable


def rendered(template: str, **values: Any) -> Markup:
    """The template of this name with these values."""
    return Markup(_ENVIRONMENT.get_template(template).render(values))
