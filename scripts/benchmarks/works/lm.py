"""A language model: capture of the residual stream, steering of one layer, and generation with steering."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks import by_hand, peers
from benchmarks.measure import OURS, Outputs, Result, Run, Settings, Ways, measured
from benchmarks.models import Subject, gpt2
from benchmarks.threads import threads
from benchmarks.works.hooks import captures_by_hookrun, hooked

BLOCKS = [f"transformer.h.{layer}" for layer in range(4)]
STEERED = BLOCKS[2]


def of_transformers(work: str, target: float) -> Callable[[Callable[[Settings], Result]], Any]:
    """A decorator for a row that needs transformers: without the package the row says "not installed"."""

    def decorate(measure: Callable[[Settings], Result]) -> Callable[[Settings], Result]:
        def row(settings: Settings) -> Result:
            if importlib.util.find_spec("transformers") is None:
                return Result(work, "by hand", target, (), missing={"transformers": "not installed"})
            with threads(2, grad=False):
                return measure(settings)

        row.__name__ = measure.__name__
        return row

    return decorate


_CAPTURE, _STEER = "gpt2 of 4 layers, capture the residual stream", "gpt2 of 4 layers, steer one layer"
_GENERATE = "gpt2 of 4 layers, generate 64 tokens, generated ones steered"


@of_transformers(_CAPTURE, 1.02)
def residual_stream(settings: Settings) -> Result:
    """Capture the outputs of all blocks."""
    ways, subject = Ways(), gpt2()
    bare = subject.make()
    ways.add("bare", lambda: bare(subject.x))
    ways.add("by hand", *by_hand.captures(subject.make(), BLOCKS, subject.x, clone=False))
    ways.add(OURS, *captures_by_hookrun(ways, subject, BLOCKS))
    for name in ("nnsight", "pyvene"):
        make = getattr(peers, f"{name}_captures")
        ways.peer(name, name, lambda make=make: make(subject, BLOCKS))
    ways.peer("transformer-lens", "transformer_lens", lambda: lens_capture(subject))
    return measured(_CAPTURE, ways, settings, target=1.02, base="by hand", slow=True)


@of_transformers(_STEER, 1.02)
def steer(settings: Settings) -> Result:
    """Add a vector to the output of one block, at every token."""
    import torch

    ways, subject = Ways(), gpt2()
    bare, hand, ours = subject.make(), subject.make(), subject.make()
    direction = torch.linspace(-1, 1, 768)
    by_hand_hook = hand.get_submodule(STEERED)
    by_hand_hook.register_forward_hook(lambda module, args, output: output + direction)
    hooked(ways, ours, select=STEERED, action="add_bias", value=direction)
    ways.add("bare", lambda: bare(subject.x))
    ways.add("by hand", lambda: hand(subject.x), lambda: {"output": hand(subject.x).logits})
    ways.add(OURS, lambda: ours(subject.x), lambda: {"output": ours(subject.x).logits})
    for name in ("nnsight", "pyvene"):
        make = getattr(peers, f"{name}_edit")
        ways.peer(name, name, lambda make=make: make(subject, [STEERED], lambda output: output + direction))
    ways.peer("transformer-lens", "transformer_lens", lambda: lens_steer(subject, direction))
    return measured(_STEER, ways, settings, target=1.02, base="by hand", slow=True)


@of_transformers(_GENERATE, 1.03)
def generate(settings: Settings) -> Result:
    """Generate 64 tokens with a cache and steer each of them; `tokens: {phase: generation}`."""
    import torch

    ways, subject = Ways(), gpt2()
    bare, hand, ours = subject.make(), subject.make(), subject.make()
    direction = torch.linspace(-1, 1, 768)

    def hook(module: Any, args: Any, output: Any) -> Any:
        return output + direction if output.shape[1] == 1 else output

    hand.get_submodule(STEERED).register_forward_hook(hook)
    hooked(ways, ours, select=STEERED, action="add_bias", value=direction, tokens={"phase": "generation"})
    mask = torch.ones_like(subject.x)

    def generated(model: Any) -> Any:
        return model.generate(
            subject.x,
            attention_mask=mask,
            max_new_tokens=64,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
        )

    ways.add("bare", lambda: generated(bare))
    ways.add("by hand", lambda: generated(hand), lambda: {"ids": generated(hand)})
    ways.add(OURS, lambda: generated(ours), lambda: {"ids": generated(ours)})
    return measured(_GENERATE, ways, settings, target=1.03, slow=True)


def lens_capture(subject: Subject) -> tuple[Run, Outputs]:
    """TransformerLens's run_with_cache of the outputs of all blocks."""
    model = peers.bridge(subject)
    hooks = {f"blocks.{layer}.hook_out": name for layer, name in enumerate(BLOCKS)}

    def run() -> Any:
        return model.run_with_cache(subject.x, names_filter=lambda name: name in hooks)[1]

    def outputs() -> dict[str, Any]:
        cache = run()
        return {name: cache[hook] for hook, name in hooks.items()}

    return run, outputs


def lens_steer(subject: Subject, direction: Any) -> tuple[Run, Outputs]:
    """TransformerLens's run_with_hooks at the output of one block."""
    model = peers.bridge(subject)
    hooks = [("blocks.2.hook_out", lambda value, hook: value + direction)]

    def run() -> Any:
        return model.run_with_hooks(subject.x, fwd_hooks=hooks)

    return run, lambda: {"output": peers.logits(run())}


ROWS = (residual_stream, steer, generate)
