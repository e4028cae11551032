"""Writes sections and their templates as one HTML file, which loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hookrun.errors import counted
from hookrun.report.captures import place
from hookrun.report.draw import text
from hookrun.report.section import ReportSection
from hookrun.store.captures.tensor_file import dtype_name
from hookrun.store.files import replacing
from hookrun.store.format import REPORT
from hookrun.version import __version__

F = TypeVar("F")

_TEMPLATES = Path(__file__).with_name("templates")
_SECTIONS = Path(__file__).with_name("sections")


def write_page(
    folder: Path, template: str, sections: Sequence[ReportSection[F]], facts: F, values: Mapping[str, Any]
) -> Path:
    """Build the sections and render them into `report.html`, which is replaced only when the new page is complete."""
    built = [(section, data) for section in sections if (data := section.build(facts)) is not None]
    page = render(
        template,
        {
            **values,
            "facts": facts,
            "sections": built,
            "built": {section.id: data for section, data in built},
        },
    )
    path = folder / REPORT
    with replacing(path, flushes=False, flushes_folder=False) as file:  # it can be made again
        file.write(page.encode("utf-8"))
    return path


def render(template: str, values: Mapping[str, Any]) -> str:
    """The HTML of the page. Every text in `values` is escaped, except `Markup`, which only this package makes."""
    script = _static("page.js")
    return _environment().get_template(template).render(
        style=_static("page.css"),
        script=script,
        # The page runs its own script only and loads nothing, whatever names a run contains.
        policy=(
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
            f"script-src 'sha256-{_digest(script)}'"
        ),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        version=__version__,
        **values,
    )  # fmt: skip


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([_TEMPLATES, _SECTIONS]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "name": text.one_line,
        "module": text.module_name,
        "number": text.number,
        "moment": text.moment,
        "place": place,
        "dtype": dtype_name,
        "duration": text.duration,
        "counted": counted,
    }
    return environment


def _shown(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    return text.visible(value) if isinstance(value, str) else value


@cache
def _static(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8").strip())


@cache
def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
