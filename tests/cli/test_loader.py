"""Config folders that are not hookrun's own are checked before anything in them has an effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hookrun.compose.compose import compose_dict
from hookrun.compose.loader import MAX_LOADS
from hookrun.errors import SpecError

GLOBAL = "# @package _global_\n"


def test_a_link_out_of_the_folder_is_not_read(conf: Callable[..., str], tmp_path: Path) -> None:
    folder = conf(**{"experiment/other": GLOBAL})
    (tmp_path / "theirs.yaml").write_text(f"{GLOBAL}seed: 7\n")
    Path(folder, "experiment/mine.yaml").symlink_to(tmp_path / "theirs.yaml")
    with pytest.raises(SpecError, match="is a link that leads out of the folder"):
        compose_dict(["experiment=mine"], folder)


def test_defaults_lists_that_multiply_are_refused(conf: Callable[..., str]) -> None:
    files = {f"a/l{n}": f"defaults: [/a/l{n + 1}@x, /a/l{n + 1}@y]\n" for n in range(12)}
    folder = conf(**files, **{"a/l12": "a: 1\n", "experiment/mine": f"{GLOBAL}defaults: [/a/l0]\n"})
    with pytest.raises(SpecError, match=f"more than {MAX_LOADS:,} configs"):
        compose_dict(["experiment=mine"], folder)


def test_a_missing_folder_is_an_error(conf: Callable[..., str], tmp_path: Path) -> None:
    folder = conf(**{"experiment/mine": GLOBAL})
    with pytest.raises(SpecError, match="there is no folder"):
        compose_dict(["experiment=mine", f"hydra.searchpath=[file://{tmp_path}/nowhere]"], folder)
