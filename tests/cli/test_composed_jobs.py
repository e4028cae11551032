"""The jobs of a sweep, composed once, and the hash that identifies each of them."""

from __future__ import annotations

from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from hookrun.cli import main
from hookrun.compose.hydra import conf_dir, opened
from hookrun.sweeps import composed_jobs
from hookrun.sweeps.composed_jobs import hash_of, without_directory


def hydra(number: int, folder: str) -> Any:
    content = {"job": {"num": number, "id": str(number)}, "runtime": {"output_dir": folder}}
    return OmegaConf.create({**content, "sweep": {"dir": folder, "subdir": str(number)}})


def test_the_hash_ignores_the_number_and_directory_of_a_job() -> None:
    def config(seed: object, number: int = 3) -> dict[str, Any]:
        users = OmegaConf.create({"seed": seed, "vars": {"a": 5}, "tags": ["${hydra:runtime.output_dir}"]})
        return without_directory(users, hydra(number, f"/sweep/{number}"))

    with opened(conf_dir()):  # makes `hydra:` resolvable
        same = [hash_of(config(*each)) for each in (("${hydra:job.num}",), ("${hydra:job.num}", 4), (0,))]
        assert len(set(same)) == 1
        assert hash_of(config("${vars.a}")) == hash_of(config(5)) != hash_of(config(6))


def test_the_hash_is_of_the_content_in_any_order() -> None:
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1}) != hash_of({"a": 1, "b": 3})
    assert hash_of({"a": 1, "hooked": True}) == hash_of({"a": 1}) != hash_of({"a": 1, "hooked": False})


@pytest.mark.parametrize("kept", [1_000, 1])
def test_each_job_is_composed_once(kept: int, notes, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = list[Any]()
    load = ConfigLoaderImpl.load_sweep_config

    def noted(self: ConfigLoaderImpl, master: Any, overrides: list[str]) -> Any:
        composed.append(overrides[-1])
        return load(self, master, overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", noted)
    monkeypatch.setattr(composed_jobs, "MOST_KEPT", kept)
    assert main(["-m", "experiment=clip_fc", "seed=5,6,7"]) == 0
    again = [] if kept > 2 else ["seed=6", "seed=7"] * 2  # to validate it, and to run it
    assert sorted(composed) == sorted(["seed=5", "seed=6", "seed=7", *again])
    assert [seed for seed, _ in notes.ran] == [5, 6, 7]
