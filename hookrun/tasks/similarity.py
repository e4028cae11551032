"""task=similarity: how alike two layers' representations of the same samples are, by linear CKA."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hookrun.errors import HookrunError, Problem
from hookrun.spec import Settings
from hookrun.spec.objective import Direction
from hookrun.tasks.of_captures import TaskOfCaptures

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.tasks.loop.analysis import Analysing, Analysis


class SimilarityTask(TaskOfCaptures):
    """Compares each module that was captured with each other."""

    task_name: ClassVar[str] = "similarity"

    def problem(self, analysis: Analysis) -> Problem | None:
        """One module alone has nothing to be compared with."""
        if len(analysis.captures) > 1:
            return None
        text = f"only {', '.join(analysis.captures)} was captured: there is nothing to compare it with"
        return Problem("task.capture", text, "capture several modules")

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """How alike two different modules are."""
        return {f"{self.name}/cka": "maximize"}

    def analyse(self, analysing: Analysing) -> None:
        """Log and show the matrix. Raises HookrunError where the modules were captured on different samples."""
        from hookrun.tasks.loop.analysis import matrix, table

        captures, seed = analysing.analysis.captures, analysing.analysis.settings.seed
        ids = [capture.sample_ids.tolist() for capture in captures.values()]
        if any(each != ids[0] for each in ids):
            raise HookrunError("the modules were captured on different samples: capture them in one run")
        matrices = {name: matrix(capture, seed) for name, capture in captures.items()}
        shown = table("linear CKA", *matrices)
        for name, rows in matrices.items():
            values = {other: linear_cka(rows, others) for other, others in matrices.items()}
            for other, value in values.items():
                analysing.run_dir.log_metrics(split=self.name, module=name, other=other, cka=value)
            shown.add_row(name, *(f"{value:.3f}" for value in values.values()))
        analysing.screen.console.print(shown)


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear centered kernel alignment of [samples, a] and [samples, b], from 0 to 1.

    ||Yᵀ X||² / (||Xᵀ X|| ||Yᵀ Y||) with centered columns and Frobenius norms: the same for rotated and for scaled
    features. Kornblith, Norouzi, Lee, Hinton: Similarity of Neural Network Representations Revisited (2019).
    """
    x, y = _centered(x), _centered(y)
    if min(x.shape[1], y.shape[1]) > len(x):  # the same from the samples' inner products
        left, right = x @ x.T, y @ y.T
        return _ratio((left * right).sum(), left.norm() * right.norm())
    return _ratio((y.T @ x).square().sum(), (x.T @ x).norm() * (y.T @ y).norm())


def _centered(x: Tensor) -> Tensor:
    return x.double() - x.double().mean(0)


def _ratio(above: Tensor, below: Tensor) -> float:
    """0 for features that do not vary."""
    return float(above / below) if below > 0 else 0.0
