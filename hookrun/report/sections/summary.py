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
        "weights": facts.model.weights,
        "data": facts.named("data") if not facts.source else "",
        "tags": ", ".join(tags_of(config)),
        "started": moment(status.get("started")),
        "duration": (duration(seconds) if seconds is not None else None),
        "seed": number(config["seed"]) if isinstance(config.get("seed"), int) else None,
        "device": _device(facts),
        "versions": ", ".join(f"{name} {found}" for name in _VERSIONS if (found := getattr(env, name))),
        "platform": env.platform,
        "plan": (facts.plan.hash or "")[:12],
        "exit code": status.get("exit_code"),
        "directory": str(facts.path),
    }
    return [(name, str(value)) for name, value in rows.items() if value not in (None, "")]


def _model(facts: Facts) -> str:
    """``resnet18 (ResNet)``: its name in the configuration, and its class if that differs by more than case."""
    name = facts.named("model") if not facts.source else ""
    cls = facts.model.type or facts.plan.model or ""
    if name.lower() == cls.lower():
        return name
    return f"{name} ({cls})" if name and cls else name or cls


def _device(facts: Facts) -> str:
    """``cpu, 1 thread of 2 cores``."""
    env = facts.env
    device = " ".join(filter(None, [env.device, env.device_name]))
    if env.threads is not None and env.cpu_count is not None:
        device += f", {counted(env.threads, 'thread')} of {counted(env.cpu_count, 'core')}"
    return device


SECTION = ReportSection("summary", "Summary", _summary, "summary.html")
