"""Lists what is public: names, commands, keys and files, one a line. Written to tests/compatibility/public.txt."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import hookrun
from hookrun import data as data_sets
from hookrun import errors, extend, models, testing
from hookrun.command.schema import experiment_schema
from hookrun.engine.actions import actions
from hookrun.engine.hook_types import HOOK_TYPES
from hookrun.engine.spec.selector import reference_rows
from hookrun.run.tasks import tasks

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "tests" / "compatibility" / "runs"
FREE = ("vars", "tags", "defaults", "hydra")
"""Root keys whose own keys are the user's or Hydra's."""


def public() -> str:
    """The whole list."""
    sections = {
        "names of hookrun": _names(hookrun),
        "names of hookrun.testing": _names(testing),
        "names of hookrun.extend": extend.__all__,
        "commands": (f"python -m hookrun{name}" for name in _commands()),
        "root keys and keys of sections": _section_keys(),
        "keys of tasks": (
            f"{name}: {' '.join(sorted(task.model_fields))}" for name, task in sorted(tasks().items())
        ),
        "keys of hooks, with those of the action": _hook_keys(),
        "hook types": HOOK_TYPES,
        "selector forms": reference_rows(),
        "data sets": _data_sets(),
        "models": _models(),
        "groups of conf/": _groups(),
        "files of a run directory": files_of(RUNS / "finished"),
        "files of an interrupted run": files_of(RUNS / "interrupted"),
        "exit codes": _exit_codes(),
    }
    return "\n".join(
        f"# {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items()
    )


def files_of(run: Path) -> list[str]:
    """The files of a run directory, with N in place of numbers."""
    names = (path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())
    return sorted({re.sub(r"\d+", "N", name) for name in names})


def _names(module: ModuleType) -> Iterator[str]:
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if not inspect.isclass(value):
            yield f"{name}{inspect.signature(value)}" if callable(value) else name
            continue
        members = sorted(member for member in _members(value) if not member.startswith("_"))
        yield f"{name}: {' '.join(members)}" if members else name


def _members(cls: type) -> set[str]:
    own = [base for base in cls.__mro__ if base.__module__.startswith("hookrun")]
    return {name for base in own for name in (*vars(base), *vars(base).get("__annotations__", ()))}


def _commands() -> Iterator[str]:
    for name in ("", ".bundle", ".report", ".schema", ".verify"):
        module = import_module(f"hookrun{name}")
        start = (
            Path(module.__path__[0], "__main__.py")
            if hasattr(module, "__path__")
            else Path(module.__file__ or "")
        )
        assert "__main__" in start.name or '__name__ == "__main__"' in start.read_text(encoding="utf-8")
        yield name


def _section_keys() -> Iterator[str]:
    schema = experiment_schema()
    for key, value in sorted(schema["else"]["properties"].items()):
        below = () if key in (*FREE, "hooks", "task") else sorted(set(_below(value, schema["$defs"])))
        yield f"{key}: {' '.join(below)}" if below else key


def _below(
    schema: Any, definitions: Mapping[str, Any], prefix: str = "", inside: tuple[str, ...] = ()
) -> Iterator[str]:
    """The key paths below a schema, through references and alternatives; `inside`: the references followed so far."""
    if isinstance(schema, list):
        for part in schema:
            yield from _below(part, definitions, prefix, inside)
    elif isinstance(schema, dict):
        name = schema.get("$ref", "").rpartition("/")[2]
        if name and name not in inside:
            yield from _below(definitions[name], definitions, prefix, (*inside, name))
        for key, value in schema.get("properties", {}).items():
            yield prefix + key
            yield from _below(value, definitions, f"{prefix}{key}.", inside)
        for key in ("else", "anyOf", "oneOf", "allOf", "items"):
            yield from _below(schema.get(key), definitions, prefix, inside)


def _hook_keys() -> Iterator[str]:
    definitions = experiment_schema()["$defs"]
    keys = {name: set(_below(definitions[f"hook_{name}"], definitions)) for name in actions()}
    common = set.intersection(*keys.values())
    yield f"every hook: {' '.join(sorted(common))}"
    for name in keys:
        yield f"{name}: {' '.join(sorted(keys[name] - common))}"


def _data_sets() -> Iterator[str]:
    for name, (module, cls) in data_sets._SOURCES.items():
        yield f"{name}: {' '.join(sorted(getattr(import_module(f'hookrun.data.{module}'), cls).model_fields))}"
    yield data_sets.PYTHON


def _models() -> Iterator[str]:
    for name, (module, cls) in models._OWN.items():
        parameters = inspect.signature(getattr(import_module(f"hookrun.models.{module}"), cls)).parameters
        yield f"{name}: {' '.join(parameters)}"
    yield "transformers"
    yield "every name of torchvision.models.list_models()"
    yield models.PYTHON


def _groups() -> Iterable[str]:
    conf = ROOT / "conf"
    return sorted(path.relative_to(conf).with_suffix("").as_posix() for path in conf.rglob("*.yaml"))


def _exit_codes() -> Iterator[str]:
    yield "0: done"
    for name in ("HookrunError", "SpecError", "CompileError", "CheckFailed"):
        yield f"{getattr(errors, name).exit_code}: {name}"
    yield "128 + n: ended by the signal n"


if __name__ == "__main__":
    (ROOT / "tests" / "compatibility" / "public.txt").write_text(public(), encoding="utf-8")
