"""The page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookrun.report import metrics
from hookrun.report.draw.text import counted, duration, moment, number, seconds_between
from hookrun.report.facts import Facts, read_facts
from hookrun.report.hooks import hook_parts, plan_rows, silences
from hookrun.report.page import write_page
from hookrun.report.records import spent, trips
from hookrun.report.repeat import repeat_run
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
    name = _named(facts, "model")
    return f"{facts.task} {name}" if name else facts.task


def _named(facts: Facts, section: str) -> str:
    """The name in a section of the configuration."""
    found = facts.config.get(section)
    return str(found.get("name") or "") if isinstance(found, dict) else ""


def _model(facts: Facts) -> str:
    """``resnet18 (ResNet)``: what the configuration calls it, and its class where that is another word."""
    name = _named(facts, "model") if not _source(facts) else ""
    cls = str(facts.model.get("class") or facts.plan.get("model") or "")
    return name if name.lower() == cls.lower() else f"{name} ({cls})" if name and cls else name or cls


def _source(facts: Facts) -> str:
    """The run that a task reads, which needs neither model nor data."""
    task = facts.config.get("task")
    return str(task.get("run") or "") if isinstance(task, dict) else ""


def _summary(facts: Facts) -> list[tuple[str, str]]:
    """What was run, when, where and with what."""
    status, env, config = facts.status, facts.env, facts.config
    seconds = None if facts.cut_off else seconds_between(status.get("started"), status.get("ended"))
    source = _source(facts)
    versions = [
        f"{name} {env[name]}"
        for name in ("hookrun", "torch", "torchvision", "hydra", "python")
        if env.get(name)
    ]
    device = " ".join(str(env[key]) for key in ("device", "device_name") if env.get(key))
    threads = ""
    if isinstance(env.get("threads"), int) and isinstance(env.get("cpu_count"), int):
        threads = f", {counted(env['threads'], 'thread')} of {counted(env['cpu_count'], 'core')}"
    rows = {
        "task": facts.task,
        "of the run": source,
        "model": _model(facts),
        "data": _named(facts, "data") if not source else "",
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
