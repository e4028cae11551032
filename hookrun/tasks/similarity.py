"""task=similarity: how similar the layers' representations of the same samples are, by linear CKA."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from hookrun.errors import HookrunError, counted, spec_error
from hookrun.spec import Settings
from hookrun.spec.objective import Direction
from hookrun.tasks.of_captures import TaskOfCaptures

if TYPE_CHECKING:
    from hookrun.store.run_dir import RunDir
    from hookrun.tasks.analysis.cka import Way
    from hookrun.tasks.analysis.input import Analysis
    from hookrun.tasks.run.progress import Screen
    from hookrun.tasks.run.resuming import Results

FEWEST_ROWS = 3
"""Two rows lie on one line in any space: centered, each module has the same products between them."""


class SimilarityTask(TaskOfCaptures):
    """Compares each captured module with each other one."""

    task_name: ClassVar[str] = "similarity"

    def check(self, analysis: Analysis) -> None:
        """Raise SpecError if there are too few modules or rows, or if the analysis needs too much memory."""
        if len(analysis.captures) < 2:
            raise spec_error(
                "task.capture",
                f"only {', '.join(analysis.captures)} was captured: there is nothing to compare it with",
                "capture several modules",
            )
        if (rows := min(len(each.sample_ids) for each in analysis.captures.values())) < FEWEST_ROWS:
            raise spec_error(
                "task.run",
                f"only {counted(rows, 'row')} captured: any CKA is then 1 or 0",
                f"capture at least {FEWEST_ROWS} samples",
            )
        self.require_memory(analysis, "comparing the modules", partial(self._needed, analysis))

    def _needed(self, analysis: Analysis, project: int | None) -> dict[str, int]:
        """The widest module -> the bytes needed to compare all modules."""
        widest = max(self.features(analysis, None).values(), key=lambda each: each.captured)
        return {widest.name: self._way(analysis, project).needed}

    def _way(self, analysis: Analysis, project: int | None) -> Way:
        from hookrun.tasks.analysis.cka import chosen_way

        return chosen_way(list(self.features(analysis, project).values()), self.max_bytes)

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The CKA of two different modules, from 0 to 1."""
        return {f"{self.name}/cka": "maximize"}

    def analyse(self, analysis: Analysis, run_dir: RunDir, screen: Screen, results: Results) -> None:
        """Log and show the matrix. Raises HookrunError if the modules were captured on different samples."""
        from hookrun.tasks.analysis.cka import linear_cka_of_all
        from hookrun.tasks.analysis.input import projection_entry, show_table

        ids = [(each.split_numbers.tolist(), each.sample_ids.tolist()) for each in analysis.captures.values()]
        if any(each != ids[0] for each in ids):
            raise HookrunError("the modules were captured on different samples: capture them in one run")
        features, way = self.features(analysis, self.project), self._way(analysis, self.project)
        self.say_memory(screen, way.needed)
        found = linear_cka_of_all(list(features.values()), way, results).tolist()
        shown = list[list[str]]()
        for number, (name, values) in enumerate(zip(features, found, strict=True)):
            shown.append([name, str(number), *(f"{value:.3f}" for value in values)])
            for other, value in zip(features, values, strict=True):
                how = projection_entry(features[name]) or projection_entry(features[other])
                run_dir.log_metrics(split=self.name, module=name, other=other, cka=value, **how)
        show_table(screen.console, ["linear CKA", "", *map(str, range(len(features)))], shown)
        self.say_projections(screen, features.values())
