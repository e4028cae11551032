"""task=probe: how well a linear model reads the label off each layer's activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hookrun.errors import HookrunError, Problem
from hookrun.spec import Settings
from hookrun.spec.objective import Direction
from hookrun.tasks.of_captures import TaskOfCaptures

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.tasks.loop.analysis import Analysing, Analysis

PROBES = "probes.safetensors"
TEST_SHARE = 0.25


class ProbeTask(TaskOfCaptures):
    """Fits a probe to what each module captured."""

    task_name: ClassVar[str] = "probe"

    def problem(self, analysis: Analysis) -> Problem | None:
        """The labels are in the data, which the run has to name."""
        run = analysis.run
        if run.config:
            return None
        return Problem("task.run", f"{run.path} does not say which data it used", "run it again")

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """How well each probe does; a probe of numbers has r2 there."""
        return {f"{self.name}/accuracy": "maximize", f"{self.name}/train_accuracy": "maximize"}

    def analyse(self, analysing: Analysing) -> None:
        """Log and show how each probe does, and write their weights."""
        from safetensors.torch import save_file

        from hookrun.tasks.loop.analysis import matrix, table

        analysis, seed = analysing.analysis, analysing.analysis.settings.seed
        shown = table("module", "features", "train", "test", "by chance")
        weights: dict[str, Tensor] = {}
        for module, capture in analysis.captures.items():
            found = probe(matrix(capture, seed), analysis.run.labels_of(capture), seed)
            analysing.run_dir.log_metrics(
                split=self.name, module=module, score=found.score, samples=len(capture),
                features=found.features, accuracy=found.test, train_accuracy=found.train, chance=found.chance,
            )  # fmt: skip
            scores = [f"{value:.3f}" for value in (found.train, found.test, found.chance)]
            shown.add_row(module, str(found.features), *scores)
            weights |= {f"{module}.{name}": tensor for name, tensor in found.weights.items()}
        analysing.screen.console.print(shown)
        save_file(weights, analysing.run_dir.path / PROBES)


@dataclass(frozen=True)
class Probed:
    """How a probe did on samples that it was fitted on and on others.

    score:    `accuracy` for classes, `r2` for numbers
    chance:   what the most frequent class, or the mean, gets on the test samples
    weights:  `weight` [classes or targets, features], `bias`, both for features as they are
    """

    score: str
    features: int
    train: float
    test: float
    chance: float
    weights: dict[str, Tensor]


def probe(features: Tensor, labels: Tensor, seed: int) -> Probed:
    """Fit on three quarters of the samples, judge on the rest.

    features: [samples, features] float32
    labels:   [samples] of integers, for logistic regression; of floats, [samples] or [samples, targets], for ridge
              regression

    Raises HookrunError where there are too few samples to judge on.
    """
    import numpy as np
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.model_selection import train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classes = not labels.is_floating_point()
    needed = math.ceil(max(len(labels.unique()) if classes else 1, 2) / TEST_SHARE)
    if len(labels) < needed:
        kinds = f" for {len(labels.unique())} classes" if classes else ""
        raise HookrunError(f"a probe needs at least {needed} samples{kinds}, {len(labels)} were captured")
    x, y = features.numpy(), labels.numpy()
    rare = (
        classes and np.unique(y, return_counts=True)[1].min() < 2
    )  # a class of one sample can't be on both sides
    parts = train_test_split(
        x, y, test_size=TEST_SHARE, random_state=seed % 2**32, stratify=y if classes and not rare else None
    )
    x_train, x_test, y_train, y_test = parts
    model: Any = LogisticRegression(max_iter=2000) if classes else RidgeCV(alphas=np.logspace(-3, 4, 8))
    fitted = make_pipeline(StandardScaler(), model).fit(x_train, y_train)
    dummy = (DummyClassifier() if classes else DummyRegressor()).fit(x_train, y_train)
    return Probed(
        score="accuracy" if classes else "r2",
        features=x.shape[1],
        train=float(fitted.score(x_train, y_train)),
        test=float(fitted.score(x_test, y_test)),
        chance=float(dummy.score(x_test, y_test)),
        weights=_weights(fitted[0], model),
    )


def _weights(scaler: Any, model: Any) -> dict[str, Tensor]:
    """The linear map of features that are not standardized."""
    import numpy as np
    import torch

    weight = np.atleast_2d(model.coef_) / scaler.scale_
    bias = np.atleast_1d(model.intercept_) - weight @ scaler.mean_
    whole = {"weight": np.ascontiguousarray(weight), "bias": bias}
    return {name: torch.from_numpy(array).float() for name, array in whole.items()}
