"""The text of a configuration equals that of `OmegaConf.to_yaml`, with and without cached parts."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hookrun.cli.hydra import conf_dir, opened
from hookrun.cli.yaml_text import plain_of, text_of
from hookrun.store.stored_config import _content, comes_back

LONG = "a long value " * 20
KEYS = st.sampled_from(["a", "on", "1", "", "key with: colon", "k" * 130, "- x", "é", "x\ny", 3, True, 1.5])
LEAVES = st.sampled_from(
    [
        1,
        True,
        1.0,
        "1",
        "true",
        None,
        "",
        LONG,
        "${a}",
        "x\ny\n",
        "é 漢 🙂",
        "# no",
        "1e3",
        float("nan"),
        "- a",
    ]
)
PLAIN = st.from_regex(r"\A[A-Za-z/][A-Za-z0-9_/.=,-]{0,120}\Z") | st.integers()
VALUES = st.recursive(
    LEAVES | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=75, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4) | st.lists(VALUES, max_size=4))
def test_the_text_equals_that_of_omegaconf(content: Any) -> None:
    config = OmegaConf.create(content)
    for _ in range(2):
        assert text_of(plain_of(config)) == OmegaConf.to_yaml(config)


ASCII = st.text(st.sampled_from("\n  " + "".join(map(chr, range(32, 127)))), max_size=200)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()


@settings(max_examples=75, deadline=None)
@given(st.dictionaries(ASCII, st.lists(ASCII | NUMBERS) | ASCII | NUMBERS, max_size=5))
def test_the_remembered_content_equals_the_content_read_back(content: dict[str, Any]) -> None:
    assert comes_back(content)
    assert not comes_back({"a": [*content, "é"]})
    assert _content(text_of(content)) == content


def test_a_second_similar_job_is_written_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"seed": 3, "in": {"dir": "/a/b", "of": ["seed=3", "x=1"], "tags": [], "text": "one, two"}}
    text_of(job)
    monkeypatch.setattr(yaml, "dump", None)
    other = {"seed": 4, "in": {**job["in"], "dir": "/a/c", "of": ["seed=4", "x=1"]}}  # type: ignore[dict-item]
    text = text_of(other)
    monkeypatch.undo()
    assert text == OmegaConf.to_yaml(OmegaConf.create(other))


def test_the_text_of_every_experiment_equals_that_of_omegaconf() -> None:
    with opened(conf_dir()) as app:
        for name in sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))[:12]:
            config = app.compose_config("config", [f"experiment={name}"], RunMode.RUN)
            assert text_of(plain_of(config)) == OmegaConf.to_yaml(config)
