"""For the `task.py` of a study: base classes of tasks, the experiment, and types of keys. Imports no torch."""

from __future__ import annotations

from hookrun.run.experiment.experiment import Experiment as Experiment  # the settings and hooks of a run
from hookrun.run.experiment.model_task import (
    samples_of_a_pass as samples_of_a_pass,  # how many samples `train.limit_batches` leaves
)
from hookrun.run.experiment.settings import (
    Settings as Settings,  # the sections of a configuration, without its hooks
)
from hookrun.run.experiment.task import (
    JobCache as JobCache,  # what the jobs of a sweep have in common while they are prepared
)
from hookrun.run.experiment.task import (
    metric_tokens_of as metric_tokens_of,  # the positions at which a task reads its scores
)
from hookrun.run.experiment.task_keys import (
    BackwardPass as BackwardPass,  # the score of a sample, for a gradient
)
from hookrun.run.experiment.task_keys import Sampling as Sampling  # temperature, top_k and top_p
from hookrun.run.experiment.task_keys import (
    ScoreKeys as ScoreKeys,  # the type of a key that is a score or its name
)
from hookrun.run.tasks.captured.base import (
    TaskOfCaptures as TaskOfCaptures,  # base of a task that analyses the captures of another run
)
from hookrun.run.tasks.captured.base import TaskOfRuns as TaskOfRuns  # base of a task that reads other runs
from hookrun.run.tasks.under_hooks import (
    TaskOfOneSplit as TaskOfOneSplit,  # base of a task that passes one split through the hooked model
)
from hookrun.run.tasks.under_hooks import (
    TaskOfSplits as TaskOfSplits,  # base of a task that passes several splits through it
)
from hookrun.store.objective import MOST_ROWS as MOST_ROWS  # the default of `max_rows`
from hookrun.store.objective import Against as Against  # the type of a key that names a run to compare with
from hookrun.store.objective import Direction as Direction  # whether a metric is to be small or large
from hookrun.store.objective import Entry as Entry  # the type of a key that is a metric
from hookrun.store.objective import MetricKeys as MetricKeys  # a metric with its options
from hookrun.store.objective import MostRows as MostRows  # the type of `max_rows`
