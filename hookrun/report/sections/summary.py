"""The main facts of a run: task, model, data, time, device, versions."""

from __future__ import annotations

from hookrun.errors import counted
from hookrun.report.draw.text import duration, moment, number, seconds_between
from hookrun.report.facts import Facts
from hookrun.report.sweep_facts import tags_of

_VERSIONS = ("hookrun", "torch", "torchvision", "hydra", "python")


def build(facts: Facts) -> list[tuple[str, str]]:
    """(name, value) pairs; unknown values are left out."""
    status, env, config = facts.status, facts.env, facts.config
    name, cls = "" if facts.source else facts.named("model"), facts.model.type or facts.plan.model or ""
    device = " ".join(filter(None, [env.device, env.device_name]))
    if env.threads is not None and env.cpu_count is not None:
        device += f", {counted(env.threads, 'thread')} of {counted(env.cpu_count, 'core')}"
    seconds = None if facts.cut_off else seconds_between(status.get("started"), status.get("ended"))
    rows = {
        "task": facts.task,
        "of the run": facts.source,
        "model": f"{name} ({cls})" if name and cls and name.lower() != cls.lower() else name or cls,
        "weights": facts.model.weights,
        "data": facts.named("data") if not facts.source else "",
        "tags": ", ".join(tags_of(config)),
        "started": moment(status.get("started")),
        "duration": (duration(seconds) if seconds is not None else None),
        "seed": number(config["seed"]) if isinstance(config.get("seed"), int) else None,
        "device": device,
        "versions": ", ".join(f"{name} {version}" for name in _VERSIONS if (version := getattr(env, name))),
        "platform": env.platform,
        "plan": (facts.plan.hash or "")[:12],
        "exit code": status.get("exit_code"),
        "directory": str(facts.path),
    }
    return [(name, str(value)) for name, value in rows.items() if value not in (None, "")]
