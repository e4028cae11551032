"""The main facts of a run: task, model, data, time, device, versions."""

from __future__ import annotations

from hookrun.errors import counted
from hookrun.report.draw.text import duration, moment, number
from hookrun.report.facts import RunData
from hookrun.store.description import note_of, tags_of
from hookrun.store.summary import seconds_between

_VERSIONS = ("hookrun", "torch", "torchvision", "hydra", "python")


def build(facts: RunData) -> list[tuple[str, str]]:
    """(name, value) pairs; unknown values are left out."""
    status = facts.status
    env = facts.env
    cls = facts.model.type or facts.plan.model or ""
    name = facts.named("model")
    data = facts.named("data")
    if facts.source:  # its model and data are those of the run that it analyses
        name = ""
        data = ""
    model = name or cls
    if name and cls and name.lower() != cls.lower():
        model = f"{name} ({cls})"
    device = " ".join(filter(None, [env.device, env.device_name]))
    if env.threads is not None and env.cpu_count is not None:
        device += f", {counted(env.threads, 'thread')} of {counted(env.cpu_count, 'core')}"
    seconds = None
    if not facts.cut_off:
        seconds = seconds_between(status.get("started"), status.get("ended"))
    versions = [f"{name} {getattr(env, name)}" for name in _VERSIONS if getattr(env, name)]
    seed = facts.config.get("seed")
    rows = {
        "task": facts.task,
        "of the run": facts.source,
        "model": model,
        "weights": facts.model.weights,
        "data": data,
        "note": note_of(facts.config),
        "tags": ", ".join(tags_of(facts.config)),
        "started": moment(status.get("started")),
        "duration": duration(seconds) if seconds is not None else None,
        "seed": number(seed) if isinstance(seed, int) else None,
        "device": device,
        "versions": ", ".join(versions),
        "platform": env.platform,
        "plan": (facts.plan.hash or "")[:12],
        "exit code": status.get("exit_code"),
        "directory": str(facts.path),
    }
    return [(name, str(value)) for name, value in rows.items() if value not in (None, "")]
