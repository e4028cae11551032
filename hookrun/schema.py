"""The JSON Schema of an experiment file, for editors: ``python -m hookrun.schema hookrun.schema.json``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import create_model

from hookrun.actions import actions
from hookrun.spec.experiment import Settings, TaskKeys
from hookrun.spec.hook import HookKeys, hook_keys
from hookrun.tasks import tasks


def experiment_schema() -> dict[str, Any]:
    """Everything that a file under experiment/ may hold; each key may be left out, for it only overrides."""
    settings = Settings.model_json_schema(ref_template="#/$defs/{model}")
    definitions: dict[str, Any] = settings.pop("$defs", {})
    of_tasks = [_task_schema(task) for task in tasks().values()]
    for schema in of_tasks:
        definitions |= schema.pop("$defs", {})
    definitions[TaskKeys.__name__] = {"anyOf": of_tasks}
    for definition in definitions.values():
        definition.pop("required", None)
    hooks = []
    for name in actions():
        schema = _hook_schema(name)
        definitions |= schema.pop("$defs", {})
        definitions[f"hook_{name}"] = schema
        hooks.append({"$ref": f"#/$defs/hook_{name}"})
    properties = settings["properties"] | {
        "hooks": {"type": "object", "additionalProperties": {"anyOf": hooks}},
        "defaults": {"type": "array", "description": "Hydra's defaults list"},
        "hydra": {"type": "object", "description": "Hydra's own settings"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hookrun experiment",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "$defs": definitions,
    }


def _task_schema(task: type[TaskKeys]) -> dict[str, Any]:
    """The section `task` of one task; without `name` in it, it is a change of whichever task is chosen elsewhere."""
    schema = task.model_json_schema(ref_template="#/$defs/{model}")
    schema["properties"] = {"name": {"const": task.task_name}} | schema["properties"]
    return schema


def _hook_schema(name: str) -> dict[str, Any]:
    action = actions()[name]
    keys = {key for hook_type in action.hook_types for key in hook_keys(hook_type.name)}
    fields: dict[str, Any] = {key: HookKeys.model_fields[key] for key in HookKeys.model_fields if key in keys}
    fields |= action.model_fields
    fields = {field: (info.annotation, info) for field, info in fields.items()}
    schema = create_model(f"{name}_hook", **fields).model_json_schema(ref_template="#/$defs/{model}")
    hook_types = sorted(hook_type.name for hook_type in action.hook_types)
    schema["properties"] |= {"action": {"const": name}, "hook": {"enum": hook_types}}
    schema["required"] = sorted({*schema.get("required", []), "action"})
    return {**schema, "title": name, "additionalProperties": False}


def main() -> int:
    """Write the schema to a file, or to stdout."""
    parser = argparse.ArgumentParser(description="Write the JSON Schema of an experiment file.")
    parser.add_argument("file", type=Path, nargs="?", help="where to; stdout unless given")
    file = parser.parse_args().file
    text = json.dumps(experiment_schema(), indent=2) + "\n"
    if file is None:
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
