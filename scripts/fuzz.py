"""Coverage-guided fuzzing of the parsers of untrusted input. It needs `pip install hookrun[fuzz]`.

    python scripts/fuzz.py TARGET [CORPUS_FOLDER] [libFuzzer flags, such as -max_total_time=600]

TARGET is one of selector, index, target, schedule, expect, yaml, limits, sweep, spec or record. A finding is any
exception other than the one that the parser raises for a mistake; libFuzzer writes its input into a file `crash-…`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["hookrun"]):
    from hookrun import api
    from hookrun.command.compose.hydra_section import wrong_choices, wrong_settings
    from hookrun.engine.spec import parse_spec
    from hookrun.engine.spec.selector import parse_selector
    from hookrun.engine.spec.when import When, parse_expect
    from hookrun.engine.values.index import parse_index, parse_target
    from hookrun.errors import HookrunError
    from hookrun.store.config.yaml_files import check_text
    from hookrun.store.reader import open_run

FOLDER = Path(tempfile.mkdtemp(prefix="hookrun-fuzz-"))


def plain(text: str) -> Any:
    """The value of a JSON text, for parsers of structured input; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def select(text: str) -> None:
    """Parse a selector."""
    parse_selector(plain(text))


def schedule(text: str) -> None:
    """Parse a schedule: `when`."""
    When.model_validate(plain(text))


def yaml_file(text: str) -> None:
    """Load a spec file."""
    file = FOLDER / "spec.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    api.load_spec(file)


def sweep(text: str) -> None:
    """Check Hydra's section of a config file."""
    content = plain(text)
    wrong_choices(content, "experiment", "file")
    wrong_settings(content, ["model"])


def spec(text: str) -> None:
    """Parse a spec given as a dict."""
    parse_spec(plain(text))


def record(text: str) -> None:
    """Read all stored records of a run directory."""
    names = ("plan.json", "status.json", "env.json", "model.json", "hooks.json", "captures/index.json")
    for name in names:
        file = FOLDER / "run" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="replace")
    run = open_run(FOLDER / "run")
    for name in ("status", "plan", "env", "model", "hooks", "config"):
        getattr(run, name)


TARGETS: dict[str, Callable[[str], object]] = {
    "selector": select,
    "index": parse_index,
    "target": parse_target,
    "schedule": schedule,
    "expect": parse_expect,
    "yaml": yaml_file,
    "limits": check_text,
    "sweep": sweep,
    "spec": spec,
    "record": record,
}


def main() -> None:
    """Fuzz the target in the first argument until libFuzzer's limits are reached."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"{__doc__}\nTARGET is one of {', '.join(TARGETS)}")
    read = TARGETS[sys.argv.pop(1)]

    def one(data: bytes) -> None:
        text = data.decode("utf-8", errors="replace")
        try:
            read(text)
        except (HookrunError, ValueError):  # pydantic's ValidationError and OutOfBounds are ValueErrors
            return

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
