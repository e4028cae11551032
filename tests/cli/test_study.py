"""The study of a sweeper that chooses the jobs by their objective."""

from __future__ import annotations

import json
import math
from pathlib import Path

from omegaconf import OmegaConf

from hookrun.cli.study import Study, prepare_study


def test_a_value_that_is_not_finite_counts_as_none_and_a_new_study_starts_empty(tmp_path: Path) -> None:
    for values in ((0.5, math.nan, math.inf, None), (0.25,)):
        study = Study(tmp_path)
        for number, value in enumerate(values):
            study.add(str(number), {"seed": "3"}, value)
        lines = [json.loads(line) for line in (tmp_path / "study.jsonl").read_text().splitlines()]
        finite = [value if value is not None and math.isfinite(value) else None for value in values]
        assert [line["value"] for line in lines] == finite
        assert [line["number"] for line in lines] == list(range(len(values)))
        assert lines[0] == {"number": 0, "job": "0", "params": {"seed": "3"}, "value": finite[0]}


def test_a_sampler_without_a_seed_gets_that_of_the_experiment(tmp_path: Path) -> None:
    for given, expected in ((None, 7), (3, 3)):
        cfg = OmegaConf.create({"hydra": {"sweeper": {"sampler": {"seed": given}}}})
        assert prepare_study(cfg, tmp_path, 2**32 + 7) == ""
        assert cfg.hydra.sweeper.sampler.seed == expected
        stored = OmegaConf.load(tmp_path / "multirun.yaml")
        assert stored.hydra.sweeper.sampler.seed == given, "as it was typed"
