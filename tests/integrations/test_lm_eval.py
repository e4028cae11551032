"""lm-evaluation-harness on models with a bundle, compared with the harness's own model under the same hooks."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_checkpoints import bundle_of, checkpoint

import hookrun

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval", reason="hookrun[lm_eval] is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from hookrun.integrations import harness
    from hookrun.integrations.lm_eval import HookedLM, main

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::hookrun.HookrunWarning"),
]

BLOCK = "transformer.h.1"
BIAS = [0.5 * number for number in range(16)]
STEER = {"select": BLOCK, "hook": "forward", "action": "add_bias", "value": BIAS}
LAST = {**STEER, "tokens": -1}
PAIRS = [("Q: yes", " no Paris"), ("yes no no Paris is", " in"), ("is", " yes"), ("Q: Q: Q: in in", " no no")]
PROMPTS = ["Q: yes", "yes no no Paris is", "is"]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def steer(gpt2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return bundle_of(STEER, gpt2, tmp_path_factory.mktemp("steer"))


@pytest.fixture(scope="module")
def last(gpt2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return bundle_of(LAST, gpt2, tmp_path_factory.mktemp("last"))


def plain(model: str) -> Any:
    return HFLM(model, device="cpu", batch_size=4)


def hooked(model: str, bundle: str | None, batch_size: int | str = 4, **options: Any) -> Any:
    return HookedLM(model, bundle=bundle, device="cpu", batch_size=batch_size, **options)


def log_likelihoods(model: Any) -> list[tuple[float, bool]]:
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
    return model.loglikelihood(requests, disable_tqdm=True)


def generated(model: Any) -> list[str]:
    options = {"until": ["."], "max_gen_toks": 5}
    requests = [Instance("generate_until", {}, (text, options), n) for n, text in enumerate(PROMPTS)]
    return model.generate_until(requests, disable_tqdm=True)


def test_log_likelihoods_are_those_of_hooked(gpt2: str, steer: str) -> None:
    reference = plain(gpt2)
    without = log_likelihoods(reference)
    with hookrun.hooked(reference.model, {"steer": STEER}):
        expected = log_likelihoods(reference)
    assert log_likelihoods(hooked(gpt2, steer)) == expected
    assert log_likelihoods(hooked(gpt2, None)) == without != expected


def test_tokens_of_padded_log_likelihoods_are_real(gpt2: str, last: str) -> None:
    reference = plain(gpt2)
    texts = [before + after for before, after in PAIRS]
    lengths = sorted((len(reference.tok_encode(text)) - 1 for text in texts), reverse=True)
    assert len(set(lengths)) > 2

    def steer_last(module: Any, args: Any, output: Any) -> Any:
        output = output.clone()
        for row, length in enumerate(lengths):
            output[row, length - 1] += torch.tensor(BIAS)
        return output

    handle = reference.model.get_submodule(BLOCK).register_forward_hook(steer_last)
    expected = log_likelihoods(reference)
    handle.remove()
    made = hooked(gpt2, last)
    assert log_likelihoods(made) == expected
    assert log_likelihoods(hooked(gpt2, last, "auto", max_batch_size=4)) == expected
    assert generated(made) == generated(hooked(gpt2, last, 1))
    assert log_likelihoods(made) == expected


def test_generated_texts_are_those_of_hooked(gpt2: str, last: str) -> None:
    reference = plain(gpt2)
    without = generated(reference)
    with hookrun.hooked(reference.model, {"steer": LAST}):
        expected = generated(reference)
    assert generated(hooked(gpt2, last)) == expected != without


def test_unknown_padding_of_a_decoder_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "t5", "t5")
    in_encoder = {**LAST, "select": "encoder.block.1", "target": "[0]"}
    bundle = bundle_of(in_encoder, model, tmp_path)
    with pytest.raises(hookrun.HookrunError, match="tokens of the decoder are padding: give batch_size=1"):
        log_likelihoods(hooked(model, bundle))
    reference = HFLM(model, device="cpu", batch_size=1)
    with hookrun.hooked(reference.model, {"steer": in_encoder}):
        expected = log_likelihoods(reference)
    assert log_likelihoods(hooked(model, bundle, 1)) == expected


def test_what_a_harness_does_not_say_is_refused(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = {
        **STEER,
        "value": {"from": 0, "to": 1, "steps": [0, 10]},
        "when": {"step": {"start": 3}, "epoch": 1},
        "tokens": {"span": "subject"},
    }
    monkeypatch.setattr(harness, "load_bundle", lambda path: hookrun.load_spec({"steer": hook}))
    with pytest.raises(hookrun.CompileError) as caught:
        hooked(gpt2, "bundle")
    wheres = [problem.where for problem in caught.value.errors]
    assert wheres == [f"hooks.steer.{key}" for key in ("when.step", "when.epoch", "value", "tokens.span")]


def test_hooks_go_with_the_model_of_the_harness(gpt2: str, steer: str) -> None:
    made = hooked(gpt2, steer)
    log_likelihoods(made)
    block = made.model.get_submodule(BLOCK)
    assert made.hooks.fired["steer", BLOCK] > 0
    del made
    gc.collect()
    assert not block._forward_hooks


@pytest.fixture
def command(gpt2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the harness's command on a task of this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    few = partialmethod(
        TaskManager.__init__, include_defaults=False
    )  # the harness's own tasks take 20 seconds
    monkeypatch.setattr(TaskManager, "__init__", few)
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)  # asks pip and other programs
    lines = [{"text": text, "answer": 1} for text in PROMPTS]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "toy", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
        "doc_to_choice": ["no Paris", "in"], "doc_to_target": "answer",
    }  # fmt: skip
    Path("task.yaml").write_text(yaml.safe_dump(task))

    def command(bundle: str) -> dict[str, Any]:
        arguments = ["--model", "hookrun", "--model_args", f"pretrained={gpt2},bundle={bundle}"]
        arguments += ["--tasks", "task.yaml", "--device", "cpu", "--batch_size", "3", "--output_path", "out"]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
        main()
        return json.loads(next(Path("out").rglob("results*.json")).read_text())

    return command


def test_the_command_is_that_of_the_harness(command: Any, gpt2: str, last: str, capsys: Any) -> None:
    result = command(last)
    assert (
        result["config"]["hookrun_plan"] == hookrun.compile(hookrun.load_bundle(last), plain(gpt2).model).hash
    )
    assert result["n-samples"]["toy"]["effective"] == 3
    with pytest.raises(SystemExit) as ended:
        command(gpt2)
    assert ended.value.code == 2
    assert "model.json" in capsys.readouterr().err
