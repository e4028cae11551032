"""inspect_ai on models with a bundle, compared with its own provider `hf` under the same hooks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import bundle_of, checkpoint

import hookrun

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    inspect_ai = pytest.importorskip("inspect_ai", reason="hookrun[inspect] is not installed")
    pytest.importorskip("transformers", reason="hookrun[inspect] is not installed")
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::hookrun.HookrunWarning"),
]

BLOCK = "transformer.h.1"
LAST = {
    **{"select": BLOCK, "hook": "forward", "action": "add_bias", "tokens": -1},
    "value": [0.5 * number for number in range(16)],
}
PROMPTS = ["Q: yes", "yes no no Paris is", "is"]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Evaluates a model on a task of three prompts, which are one batch, padded on the left."""
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "inspect"))

    def completions(model: Any) -> list[str]:
        samples = [Sample(input=text, target="no") for text in PROMPTS]
        task = inspect_ai.Task(dataset=samples, scorer=includes())
        (log,) = inspect_ai.eval(
            task, model=model, max_connections=len(PROMPTS), max_tokens=5, display="none",
            log_dir=str(tmp_path / "logs"),
        )  # fmt: skip
        assert log.status == "success", log.error
        return [sample.output.completion for sample in log.samples]

    yield completions
    gc.collect()  # inspect_ai leaves streams open, which warn: here that is ignored


def test_completions_are_those_of_hooked(gpt2: str, tmp_path: Path, completions: Any) -> None:
    options: Any = {"do_sample": False, "device": "cpu", "memoize": False}
    reference = get_model(f"hf/{gpt2}", **options)
    without = completions(reference)
    with hookrun.hooked(reference.api.model, {"steer": LAST}):
        expected = completions(reference)
    made = get_model(f"hookrun/{gpt2}", bundle=bundle_of(LAST, gpt2, tmp_path), **options)
    assert completions(made) == expected != without
    assert made.api.hooks.fired["steer", BLOCK] == 5
    block = made.api.model.get_submodule(BLOCK)
    made.api.close()
    assert not block._forward_hooks
    assert completions(get_model(f"hookrun/{gpt2}", **options)) == without
