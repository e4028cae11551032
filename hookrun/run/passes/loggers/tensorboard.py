"""The TensorBoard logger: metrics and statistics as scalars, captured tensors as histograms and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING, Any, ClassVar

from hookrun.engine.actions.base import ABOUT
from hookrun.run.passes.loggers import LoggedRun, RunLogger, histogram_of, place_of, tag
from hookrun.store.format import entries

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.engine.runtime.site import HookSite
    from hookrun.store.records import Of

FOLDER = "tensorboard"
MOST_CHANNELS = 64
MOST_ELEMENTS = 100_000
"""The largest number of elements in a histogram; of larger tensors, evenly spaced elements are used."""


class TensorBoard(RunLogger):
    """Writes event files into the run directory; tags are named as in the report, ``hook/module/statistic/mode``."""

    logger_name: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboard"

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.path / FOLDER), flush_secs=5)
        # indented: Markdown shows it verbatim
        lines = (f"    {key}: {value}" for key, value in entries(run.config))
        self._writer.add_text("config", "\n".join(lines))

    def metrics(self, split: str, values: Mapping[str, float], step: int, of: Of | None = None) -> None:
        """A line of metrics.jsonl."""
        for name, value in values.items():
            self._writer.add_scalar(tag(split, name, of), value, step)

    def record(self, record: dict[str, Any]) -> None:
        """Log the numbers in a line of stats.jsonl, a histogram and counts as histograms.

        Other lists, quantiles and what keeps a dimension, are left out: TensorBoard has no chart for them.
        """
        if "spent" in record:
            return  # the line says that a hook's captures ended, and has no value
        place = place_of(record["hook"], record["module"], record["path"])
        step = self._step(record["mode"], record["step"])
        for name, value in record.items():
            if name in ABOUT:
                continue
            tag = f"{place}/{name}/{record['mode']}"
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(tag, value, step)
            elif (found := histogram_of(name, value)) is not None:
                self._add_counts(tag, *found, step)

    def value(self, site: HookSite, value: Any) -> None:
        """Log a histogram of each tensor in a captured value, and the first sample's maps of tensors [B, C, H, W]."""
        from hookrun.engine.values.containers import leaves

        clock = site.clock
        step = self._step(clock.mode, clock.step)
        for path, leaf in leaves(value):
            if leaf is None or not leaf.numel():
                continue
            tag = f"{place_of(site.hook_name, site.path, site.current.within + path)}/{clock.mode}"
            tensor = leaf.detach()
            tensor = (tensor.abs() if tensor.is_complex() else tensor).float().cpu()
            flat = tensor.flatten()[:: -(-tensor.numel() // MOST_ELEMENTS)]
            finite = flat[flat.isfinite()]
            if len(finite):
                self._writer.add_histogram(tag, finite, step)
            if tensor.dim() == 4 and min(tensor.shape[2:]) > 1:
                self._writer.add_image(f"{tag}/maps", _maps(tensor[0]), step)

    def _add_counts(self, tag: str, counts: Sequence[int], edges: Sequence[float], step: int) -> None:
        """A histogram whose elements are known by their bins alone: their sums are those of the middles."""
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        self._writer.add_histogram_raw(
            tag,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(map(mul, counts, middles)),
            sum_squares=sum(map(mul, counts, map(mul, middles, middles))),
            bucket_limits=list(edges[1:]),
            bucket_counts=list(counts),
            global_step=step,
        )

    def close(self, *, failed: bool) -> None:
        """Write what is buffered."""
        self._writer.close()

    def _step(self, mode: str, step: int) -> int:
        return step + self.reached if mode == "eval" else step


def _maps(channels: Tensor) -> Tensor:
    """[C, H, W] -> [3, h, w] from 0 to 1: the first channels in a grid, all on one scale."""
    import torch
    from torchvision.utils import make_grid

    tiles = torch.nan_to_num(channels[:MOST_CHANNELS]).unsqueeze(1)
    return make_grid(tiles, nrow=max(1, round(len(tiles) ** 0.5)), normalize=True, padding=1, pad_value=0.5)
