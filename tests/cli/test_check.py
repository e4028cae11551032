"""Every wrong override of a command line is reported with the nearest existing names."""

from __future__ import annotations

from hookrun.compose.errors import wrong_overrides
from hookrun.compose.hydra import Composition, conf_dir, opened


def test_each_mistake_is_reported_with_the_nearest_keys() -> None:
    with opened(conf_dir()) as app:
        typed = ["sed=1", "train.epochs=3", "train.epoch=3", "experiment=clip_fc"]
        found = wrong_overrides(Composition(app, "config", typed))
        said = {problem.where: problem.hint for problem in found}
        assert set(said) == {"sed", "train.epoch"}
        assert "seed" in said["sed"] and "train.epochs" in said["train.epoch"]


def test_an_invalid_choice_and_an_unparsable_override_are_reported() -> None:
    with opened(conf_dir()) as app:
        (choice,) = wrong_overrides(Composition(app, "config", ["model=cn"]))
        assert "cnn" in f"{choice.what} {choice.hint}"
        (unread,) = wrong_overrides(Composition(app, "config", ["seed={", "train.epochs=3"]))
        assert "seed" in unread.where
        assert wrong_overrides(Composition(app, "config", ["seed=3", "model=mlp"])) == []
