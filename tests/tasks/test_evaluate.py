"""task=evaluate: means over all samples of a split, and their names in the log."""

from __future__ import annotations

import pytest

from hookrun.tasks import parse_experiment, task_of


def test_evaluate_gives_the_mean_over_all_samples_for_any_batch_size(run) -> None:
    losses = [run("task=evaluate", f"data.batch_size={size}").metrics[-1]["loss"] for size in (64, 359, 7)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_the_metrics_that_can_be_optimized_are_those_of_its_split() -> None:
    def measures(**task: object) -> dict[str, str | None]:
        plain = {"model": {"name": "cnn"}, "data": {"name": "digits"}}
        experiment = parse_experiment({**plain, "task": {"name": "evaluate", **task}})
        return dict(task_of(experiment).measures(experiment.settings))

    assert measures() == {"val/loss": "minimize", "val/accuracy": "maximize"}
    found = measures(split="train", metrics=["perplexity"])
    assert found == {"train/loss": "minimize", "train/perplexity": "minimize"}
