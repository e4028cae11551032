"""The page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookrun.report import metrics
from hookrun.report.facts import Facts, read_facts
from hookrun.report.hooks import hook_parts, plan_rows, silences
from hookrun.report.page import write_page
from hookrun.report.records import spent, trips
from hookrun.report.repeat import repeat_run
from hookrun.report.text import duration, moment, number, seconds_between
from hookrun.report.tree import model_tree
from hookrun.store.format import CONFIG


def write_run_report(folder: Path) -> Path:
    """Write the page of the run in `folder`."""
    facts = read_facts(folder)
    probed = metrics.probes(facts)
    parts = hook_parts(facts)
    values: dict[str, Any] = {
        "title": _title(facts),
        "run": facts,
        "silent": silences(facts),
        "trips": trips(facts),
        "latest": metrics.latest(facts),
        "curves": metrics.curves(facts),
        "probes": probed,
        "probe_figure": metrics.probe_figure(probed) if probed else None,
        "similarity": metrics.similarity(facts),
        "plan": plan_rows(facts),
        "tree": model_tree(facts),
        "hooks": parts,
        "shown_hooks": {part.order for part in parts},
        "traceback": facts.text("error.txt"),
        "config": facts.text(CONFIG),
    }
    facts.notes += spent(facts)
    values["repeat"] = repeat_run(folder, facts.env.get("argv", []))
    values["summary"] = _summary(facts)  # last: the notes are complete
    return write_page(folder, "run.html", values)


def _title(facts: Facts) -> str:
    """The experiment, where one was named; else task and model."""
    repeat = facts.env.get("argv", [])
    named = [
        text.partition("=")[2] for text in map(str, repeat) if text.lstrip("+").startswith("experiment=")
    ]
    if named and "," not in named[-1]:
        return named[-1]
    if source := _source(facts):
        return f"{facts.task} of {Path(source).name}"
    model = facts.config.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    return f"{facts.task} {name}" if name else facts.task


def _source(facts: Facts) -> str:
    """The run that a task reads, which needs neither model nor data."""
    task = facts.config.get("task")
    return str(task.get("run") or "") if isinstance(task, dict) else ""


def _summary(facts: Facts) -> list[tuple[str, str]]:
    """What was run, when, where and with what."""
    status, env, config = facts.status, facts.env, facts.config
    seconds = None if facts.cut_off else seconds_between(status.get("started"), status.get("ended"))
    model = facts.model.get("class") or facts.plan.get("model")
    source = _source(facts)
    data = config.get("data") if isinstance(config.get("data"), dict) and not source else {}
    versions = [
        f"{name} {env[name]}"
        for name in ("hookrun", "torch", "torchvision", "hydra", "python")
        if env.get(name)
    ]
    device = " ".join(str(env[key]) for key in ("device", "device_name") if env.get(key))
    threads = f", {env['threads']} threads of {env.get('cpu_count')} cores" if env.get("threads") else ""
    rows = {
        "task": facts.task,
        "of the run": source,
        "model": model,
        "data": (data or {}).get("name"),
        "started": moment(status.get("started")),
        "duration": (duration(seconds) if seconds is not None else None),
        "seed": number(config["seed"]) if isinstance(config.get("seed"), int) else None,
        "device": device + threads,
        "versions": ", ".join(versions),
        "platform": env.get("platform"),
        "plan": str(facts.plan.get("hash", ""))[:12],
        "exit code": status.get("exit_code"),
        "directory": str(facts.path),
    }
    return [(name, str(value)) for name, value in rows.items() if value not in (None, "")]
