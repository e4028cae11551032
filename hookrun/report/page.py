"""A template and its values -> one file of HTML that asks nothing of the network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hookrun.report.draw import text
from hookrun.store.files import replacing
from hookrun.store.format import REPORT
from hookrun.version import __version__

_TEMPLATES = Path(__file__).with_name("templates")


def write_page(folder: Path, template: str, values: Mapping[str, Any]) -> Path:
    """Render into `report.html`; the page that was there before stays until the new one is whole."""
    path = folder / REPORT
    page = render(template, values)
    with replacing(path) as file:
        file.write(page.encode("utf-8"))
    return path


def render(template: str, values: Mapping[str, Any]) -> str:
    """The page. Every text in `values` is escaped, but for `Markup`, which only code of this package makes."""
    script = _static("page.js")
    return _environment().get_template(template).render(
        style=_static("page.css"),
        script=script,
        # The page runs its own script and no other, and loads nothing: whatever a run's names may hold.
        policy=(
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
            f"script-src 'sha256-{_digest(script)}'"
        ),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        version=__version__,
        **values,
    )  # fmt: skip


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
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
        "duration": text.duration,
        "counted": text.counted,
    }
    return environment


def _shown(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    return text.visible(value) if isinstance(value, str) else value


def _static(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8").strip())


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
