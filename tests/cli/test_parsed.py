"""The text of a config file is parsed once, with the same result as OmegaConf."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hookrun.cli.hydra import conf_dir
from hookrun.cli.parsed import content_of


def test_installed_files_are_parsed_as_by_omegaconf() -> None:
    files = [*conf_dir().rglob("*.yaml"), *Path(str(resources.files("hydra"))).rglob("conf/**/*.yaml")]
    assert len(files) > 100
    for file in files:
        text = file.read_text(encoding="utf-8")
        expected = OmegaConf.load(file)
        for _ in range(2):
            found = content_of(text, installed=True)
            assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected), file
            assert OmegaConf.to_container(found) == OmegaConf.to_container(expected)


def test_a_composition_does_not_change_the_cached_content_and_a_bare_value_is_refused() -> None:
    for installed in (True, False):
        content_of("a: {b: 1}\n", installed=installed).a.b = 2
        assert content_of("a: {b: 1}\n", installed=installed) == {"a": {"b": 1}}
        assert content_of("", installed=installed) == {}
        with pytest.raises(OSError, match="Invalid loaded object type: int"):
            content_of("3\n", installed=installed)
