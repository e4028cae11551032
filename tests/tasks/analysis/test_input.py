"""An analysis that was killed is resumed with its next part; recorded parts are not computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hookrun
from hookrun.cli import main
from hookrun.tasks.analysis import cka, linear_probe
from hookrun.tasks.resume import states as resuming

SMALL = ("compute.device=cpu", "compute.threads=1")
SEEN = "+hooks.seen={select: [layers.1, fc], hook: forward, action: capture}"


class Killed(BaseException):
    """Raised where the process is killed."""


def recorded(path: Path) -> dict[str, Any]:
    files = [path / name for name in ("metrics.jsonl", "probes.safetensors") if (path / name).exists()]
    left = sorted(each.name for each in path.iterdir() if each.name != "report.html")
    return {"left": left, **{file.name: file.read_bytes() for file in files}}


def test_each_module_is_analysed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    captured = [*SMALL, "model=mlp", "task=predict", "train.limit_batches=2", SEEN, "hydra.run.dir=captured"]
    assert main(captured) == 0
    calls = list[str]()
    for module, name in ((linear_probe, "fit"), (cka, "_by_samples"), (cka, "_by_features")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real: calls.append("") or real(*args))
    for task, parts in (("probe", 2), ("similarity", 1)):
        argv = [f"task={task}", "task.run=captured"]
        assert main([*SMALL, *argv, f"hydra.run.dir={task}"]) == 0
        expected = recorded(tmp_path / task)
        for part in range(1, parts + 1):
            name = f"{task}{part}"
            real_write, left = resuming.write_state, [part]

            def write(*args: Any, real: Any = real_write, left: list[int] = left, **options: int) -> None:
                real(*args, **options)
                left[0] -= 1
                if not left[0]:
                    raise Killed

            with monkeypatch.context() as patch, pytest.raises(Killed):
                patch.setattr(resuming, "write_state", write)
                main([*SMALL, *argv, f"hydra.run.dir={name}"])
            calls.clear()
            assert hookrun.open_run(tmp_path / name).status["status"] != "done"
            assert main([*SMALL, f"resume={name}"]) == 0
            assert recorded(tmp_path / name) == expected
            assert len(calls) == parts - part
