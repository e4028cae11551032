"""The JSON Schema of experiments and hook sets, for editors: ``python -m hookrun.schema hookrun.schema.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import create_model

from hookrun.command.json_form import output_schema
from hookrun.command.json_output import Parser, answered
from hookrun.command.outcome import Outcome
from hookrun.engine.actions import actions
from hookrun.engine.spec.hook import HookKeys, hook_keys
from hookrun.errors import SpecError
from hookrun.run.experiment.settings import Settings, TaskKeys
from hookrun.run.tasks import tasks
from hookrun.terminal import words

Schema = dict[str, Any]

_INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{.+\}"}
_DEFAULTS: Schema = {"type": "array", "description": "Hydra's defaults list"}
_HOOKS: Schema = {"type": ["object", "null"], "additionalProperties": {"$ref": "#/$defs/hook"}}
_HAS_HOOK: Schema = {
    "not": {
        "additionalProperties": {
            "not": {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]}
        }
    }
}
"""Matches if some root key is a hook: the file is a hook set, as in conf/hooks/, not an experiment."""


def experiment_schema() -> Schema:
    """The JSON Schema of files in experiment/ and hooks/.

    All keys of an experiment are optional, because it only overrides, and any value may be an interpolation.
    """
    settings = Settings.model_json_schema(ref_template="#/$defs/{model}")
    definitions: Schema = settings.pop("$defs", {})
    definitions[TaskKeys.__name__], of_tasks = _task_schema()
    definitions |= of_tasks
    for definition in definitions.values():
        definition.pop("required", None)
    for name in actions():
        schema = _hook_schema(name)
        definitions |= schema.pop("$defs", {})
        definitions[f"hook_{name}"] = schema
    definitions = {name: _interpolable(definition) for name, definition in definitions.items()}
    definitions["hook"] = _any_hook(definitions)
    properties = {key: _open(_interpolable(schema)) for key, schema in settings["properties"].items()}
    properties["hooks"] = _open(_HOOKS)
    properties["defaults"] = _DEFAULTS
    properties["hydra"] = {"type": "object", "description": "Hydra's own settings"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hookrun experiment or hook set",
        "type": "object",
        "if": _HAS_HOOK,
        "then": _HOOKS | {"title": "hook set", "properties": {"defaults": _DEFAULTS}},
        "else": {"title": "experiment", "properties": properties, "additionalProperties": False},
        "$defs": definitions,
    }


def _any_hook(definitions: Mapping[str, Schema]) -> Schema:
    """The schema of a hook, whose keys depend on its action; without an action it changes a hook of another file."""
    names = list(actions())
    keys: dict[str, None] = {}
    cases: list[Schema] = []
    for name in names:
        keys |= dict.fromkeys(definitions[f"hook_{name}"]["properties"])
        has_action = {"type": "object", "properties": {"action": {"const": name}}, "required": ["action"]}
        cases.append({"if": has_action, "then": {"$ref": f"#/$defs/hook_{name}"}})
    cases.append({"if": {"required": ["action"]}, "else": {"propertyNames": {"enum": list(keys)}}})
    properties = {"action": _open({"enum": names})}
    return _open({"type": "object", "properties": properties, "allOf": cases})


def _task_schema() -> tuple[Schema, Schema]:
    """The schema of the section `task`, and its definitions.

    It has the keys of all tasks, since keys of other tasks are allowed, with a note.
    """
    keys: dict[str, list[Schema]] = {}
    definitions: Schema = {}
    for task in tasks().values():
        of_task = task.model_json_schema(ref_template="#/$defs/{model}")
        definitions |= of_task.pop("$defs", {})
        for key, schema in of_task.get("properties", {}).items():
            if schema not in keys.setdefault(key, []):
                keys[key].append(schema)
    properties: dict[str, Schema] = {}
    for key, schemas in keys.items():
        properties[key] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    section = {
        "type": "object",
        "properties": {"name": {"enum": list(tasks())}, **properties},
        "additionalProperties": False,
    }
    return section, definitions


def _hook_schema(name: str) -> Schema:
    action = actions()[name]
    hook_types = sorted(hook_type.name for hook_type in action.hook_types)
    keys = set[str]().union(*map(hook_keys, hook_types))
    common = {key: info for key, info in HookKeys.model_fields.items() if key in keys}
    fields: dict[str, Any] = {}
    for key, info in (common | action.model_fields).items():
        fields[key] = (info.annotation, info)
    schema = create_model(f"{name}_hook", **fields).model_json_schema(ref_template="#/$defs/{model}")
    schema["properties"] |= {"action": {"const": name}, "hook": {"enum": hook_types}}
    schema["required"] = sorted({*schema.get("required", []), "action"})
    return {**schema, "title": name, "additionalProperties": False}


def _open(schema: Schema) -> Schema:
    """The schema of a value or an interpolation; error messages are those of the value."""
    kept = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    return kept | {"if": _INTERPOLATION, "else": schema}


def _interpolable(schema: Schema) -> Schema:
    """The schema with an interpolation allowed for each value inside it."""
    inner = dict(schema)
    for key in {"anyOf", "oneOf", "allOf"} & inner.keys():
        inner[key] = [_interpolable(variant) for variant in inner[key]]
    for key in {"items", "additionalProperties"} & inner.keys():
        inner[key] = _member(inner[key])
    if "prefixItems" in inner:
        inner["prefixItems"] = [_member(item) for item in inner["prefixItems"]]
    if "properties" in inner:
        inner["properties"] = {key: _member(field) for key, field in inner["properties"].items()}
    return inner


def _member(schema: Any) -> Any:
    """The schema of a value inside another one. The action is fixed, by which the case was chosen."""
    is_fixed = not isinstance(schema, dict) or "const" in schema
    return schema if is_fixed else _open(_interpolable(schema))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the schema to a file, or to stdout. Returns the exit code: 2 where an installed extension is wrong."""
    return answered(argv, _main)


def _main(arguments: list[str], outcome: Outcome) -> int:
    parser = Parser(outcome, description="Write the JSON Schema of experiments and hook sets.")
    parser.add_argument("file", type=Path, nargs="?", help="the file to write; by default stdout")
    parser.add_argument("--output", action="store_true", help="the schema of what commands print with --json")
    parser.add_argument("--agents", action="store_true", help="the page for programs")
    flags = parser.parse_args(arguments)
    file = flags.file
    try:
        if flags.agents:
            text = files("hookrun").joinpath("AGENTS.md").read_text(encoding="utf-8")
        else:
            schema = output_schema() if flags.output else experiment_schema()
            text = json.dumps(schema, indent=2) + "\n"
    except SpecError as error:
        outcome.tell(error)
        return error.exit_code
    if file is None:
        with words():
            sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")
    return 0
