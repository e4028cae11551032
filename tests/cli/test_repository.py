"""Copies of Hydra's list of config folders share their folders, and have a list of their own."""

from __future__ import annotations

import copy

from hookrun.cli.hydra import conf_dir, opened
from hookrun.cli.repository import Repository


def test_a_copy_shares_the_sources_and_may_have_others() -> None:
    with opened(conf_dir()) as app:
        repository = app.config_loader.repository
        assert isinstance(repository, Repository)
        before = list(repository.get_sources())
        copied = copy.deepcopy(repository)
        assert all(one is other for one, other in zip(before, copied.get_sources(), strict=True))
        copied.initialize_sources(app.config_loader.config_search_path)
        assert copied.get_sources() is not repository.get_sources()
        assert repository.get_sources() == before
