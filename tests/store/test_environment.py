"""The versions and the machine of a run, and no value of an environment variable."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from hookrun.store.environment import environment


def test_the_environment_names_versions_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "0123456789abcdef")
    found = environment(argv=["hookrun", "experiment=clip_fc"], device="cpu")
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["argv"] == ["hookrun", "experiment=clip_fc"]
    assert (found["device"], found["threads"]) == ("cpu", torch.get_num_threads())
    assert {"torchvision", "hydra", "hookrun", "platform", "cpu_count"} <= set(found)
    assert "0123456789abcdef" not in json.dumps(found)
