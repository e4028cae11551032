"""attributions.safetensors: how much each part of an input or a layer adds to a score."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hookrun.studies.kit.files import Run

ATTRIBUTIONS = "attributions.safetensors"


def attributions_of(run: Run) -> dict[str, Tensor]:
    """`Run.attributions`: the tensors of the file; empty if the run has none."""
    from hookrun.studies.kit.files import read_tensors

    path = run.path / ATTRIBUTIONS
    return read_tensors(path, run.path)[0] if os.path.lexists(path) else {}
