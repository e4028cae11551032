"""The main facts of a run: task, model, data, time, device, versions."""

from __future__ import annotations

from hookrun.errors import counted
from hookrun.report.draw.text import duration, moment, number, seconds_between
from hookrun.report.facts import Facts
from hookrun.report.jobs import tags_of
from hookrun.report.section import ReportSection

_VERSIONS = ("hookrun", "torch", "torchvision", "hydra", "python")


def _summary(facts: Facts) -> list[tuple[str, str]]:
    """(name, value) pairs; unknown values are left out."""
    status, env, config = facts.status, facts.env, facts.config
    seconds = None if facts.cut_off else seconds_between(status.get("started"), status.get("ended"))
    rows = {
        "task": facts.task,
        "of the run": facts.source,
        "model": _model(facts),
        "weights": facts.model.get("weights"),
        "data": facts.named("data") if not facts.source else "",
        "tags": ", ".join(tags_of(config)),
        "started": moment(status.get("started")),
        "duration": (duration(seconds) if seconds is not None else None),
        "seed": number(config["seed"]) if isinstance(config.get("seed"), int) else None,
        "device": _device(facts),
        "versions": ", ".join(f"{name} {env[name]}" for name in _VERSIONS if env.get(name)),
        "platform": env.get("platform"),
        "plan": str(facts.plan.get("hash", ""))[:12],
        "exit code": status.get("exit_code"),
        "directory": str(facts.path),
    }
    return [(name, str(value)) for name, value in rows.items() if value not in (None, "")]


def _model(facts: Facts) -> str:
    """``resnet18 (ResNet)``: its name in the configuration, and its class if that differs by more than case."""
    name = facts.named("model") if not facts.source else ""
    cls = str(facts.model.get("class") or facts.plan.get("model") or "")
    if name.lower() == cls.lower():
        return name
    return f"{name} ({cls})" if name and cls else name or cls


def _device(facts: Facts) -> str:
    """``cpu, 1 thread of 2 cores``."""
    env = facts.env
    device = " ".join(str(env[key]) for key in ("device", "device_name") if env.get(key))
    threads, cores = env.get("threads"), env.get("cpu_count")
    if isinstance(threads, int) and isinstance(cores, int):
        device += f", {counted(threads, 'thread')} of {counted(cores, 'core')}"
    return device


SECTION = ReportSection("summary", "Summary", _summary, "summary.html")
