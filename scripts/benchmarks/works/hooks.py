"""Hooks in memory: captures, edits, gradients, compiled models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import by_hand, peers
from benchmarks.measure import OURS, Outputs, Result, Run, Settings, Ways, measured
from benchmarks.models import Subject, gpt2, leaves, mlp, resnet18, running
from benchmarks.threads import threads


def hooked(ways: Ways, model: Any, **hook: Any) -> Any:
    """Install a hook with hookrun until the ways have been measured; returns the installation."""
    import hookrun

    return ways.stack.enter_context(hookrun.hooked(model, {"bench": {"hook": "forward", **hook}}))


def captures_by_hookrun(ways: Ways, subject: Subject, names: Sequence[str]) -> tuple[Run, Outputs]:
    """Captures of these modules by hookrun, dropped after each forward."""
    model = subject.make()
    kept = hooked(ways, model, select=list(names), action="capture").captures["bench"]
    lists = {name: kept[name] for name in names}
    return by_hand.kept_by(lists, lambda: model(subject.x))


def capture_ways(subject: Subject, settings: Settings) -> Ways:
    """Captures of all leaves that run: by hand in two ways, by hookrun and by other libraries."""
    ways = Ways()
    bare = subject.make()
    names = running(subject)
    ways.add("bare", lambda: bare(subject.x))
    run, references = by_hand.captures(subject.make(), names, subject.x, clone=False)
    ways.add("by hand", run)
    run, clones = by_hand.captures(subject.make(), names, subject.x, clone=True)
    ways.add("by hand, cloned", run, clones)
    kept = references()  # in-place modules overwrite some of them, those of other libraries too
    ways.lasting = frozenset(name for name, value in clones().items() if value.equal(kept[name]))
    ways.add(OURS, *captures_by_hookrun(ways, subject, names))
    once = [name for name in names if name not in subject.repeated]
    peers.add_captures(ways, subject, once, wanted=settings.peers)
    return ways


def capture_mlp(settings: Settings) -> Result:
    """mlp, capture all 15 leaves."""
    with threads(1):
        return measured("mlp, capture all 15 leaves", capture_ways(mlp(), settings), settings, target=1.40)


def capture_mlp_inference(settings: Settings) -> Result:
    """The same without gradients."""
    with threads(1, grad=False):
        ways = capture_ways(mlp(), Settings())
        return measured("mlp, capture all 15 leaves, inference", ways, settings, target=1.40)


def early_exit_resnet18(settings: Settings) -> Result:
    """resnet18, capture the output of layer2 and compute nothing after it."""
    import hookrun

    path, subject = "layer2", resnet18()
    with threads(2, grad=False):
        ways, whole, ours = Ways(), subject.make(), subject.make()
        ways.add("whole forward", lambda: whole(subject.x))
        ways.add("by hand, exception", *by_hand.early_exit(subject.make(), path, subject.x))
        kept = hooked(ways, ours, select=path, action="capture").captures["bench"][path]
        stop = {"stop": {"select": path, "hook": "forward", "action": "stop_forward"}}
        ways.stack.enter_context(hookrun.hooked(ours, stop))
        ways.add(OURS, *by_hand.kept_by({path: kept}, lambda: ours(subject.x)))
        work, base = "resnet18, capture layer2 and stop", "by hand, exception"
        return measured(work, ways, settings, target=1.05, base=base, slow=True)


def clamp_mlp(settings: Settings) -> Result:
    """mlp, clamp 7 ReLU outputs."""
    from torch import nn

    def edit(output: Any) -> Any:
        return output.clamp(0, 1)

    with threads(1, grad=False):
        ways = edit_ways(nn.ReLU, edit, {"action": "clamp", "min": 0, "max": 1}, settings)
        return measured("mlp, clamp 7 ReLU outputs, inference", ways, settings, target=1.25)


def scale_mlp(settings: Settings) -> Result:
    """mlp, scale 8 Linear outputs."""
    from torch import nn

    def edit(output: Any) -> Any:
        return output * 2.0

    with threads(1, grad=False):
        ways = edit_ways(nn.Linear, edit, {"action": "scale", "factor": 2.0}, settings)
        return measured("mlp, scale 8 Linear outputs, inference", ways, settings, target=1.30)


def edit_ways(cls: type, edit: Callable[[Any], Any], hook: dict[str, Any], settings: Settings) -> Ways:
    """The same edit of all leaves of a class: by hand, by hookrun and by other libraries."""
    ways, subject = Ways(), mlp()
    x = subject.x
    bare, hand, ours = subject.make(), subject.make(), subject.make()
    by_hand.edits(hand, cls, edit)
    hooked(ways, ours, select=f"type:{cls.__name__}", **hook)
    names = [name for name, _ in leaves(bare, cls)]
    ways.add("bare", lambda: bare(x))
    ways.add("by hand", lambda: hand(x), lambda: {"output": hand(x)})
    ways.add(OURS, lambda: ours(x), lambda: {"output": ours(x)})
    for name in ("nnsight", "pyvene"):
        make = getattr(peers, f"{name}_edit")
        ways.peer(name, name, partial(make, subject, names, edit), wanted=settings.peers)
    return ways


def gradient_mlp(settings: Settings) -> Result:
    """mlp, capture the gradient of one activation."""
    ways, subject = Ways(), mlp()
    x, path = subject.x, "7"
    bare, full, tensor, ours = (subject.make() for _ in range(4))
    seen: dict[str, Any] = {}

    def keep(gradient: Any) -> None:
        seen["gradient"] = gradient

    full.get_submodule(path).register_full_backward_hook(
        lambda module, grad_input, grad_output: keep(grad_output[0])
    )

    def on_output(module: Any, args: Any, output: Any) -> None:
        output.register_hook(keep)

    tensor.get_submodule(path).register_forward_hook(on_output)
    captured = hooked(ways, ours, select=path, hook="output_grad", action="capture").captures["bench"][path]

    def step(model: Any) -> None:
        model(x).sum().backward()

    def seen_by(model: Any) -> Outputs:
        def outputs() -> dict[str, Any]:
            step(model)
            return dict(seen)

        return outputs

    run, outputs = by_hand.kept_by({"gradient": captured}, partial(step, ours))
    with threads(1):
        ways.add("bare", partial(step, bare))
        ways.add("by hand, tensor hook", partial(step, tensor), seen_by(tensor))
        ways.add("by hand, full backward hook", partial(step, full), seen_by(full))
        ways.add(OURS, run, outputs)
        work = "mlp, gradient seen on one activation, forward + backward"
        return measured(work, ways, settings, target=1.08)


def quantize_mlp(settings: Settings) -> Result:
    """mlp of width 512, quantize 7 ReLU outputs to 8 bits."""
    import torch
    from torch import nn

    subject, ways = mlp(width=512, batch=256), Ways()

    def ranged(seen: Any) -> Any:
        """Scale and zero for the range of a tensor."""
        low, high = seen.amin().clamp_max(0), seen.amax().clamp_min(0)
        scale = ((high - low) / 255).clamp_min(torch.finfo(torch.float32).tiny)
        return scale, (-(low / scale).round()).clamp(0, 255)

    def plainly(output: Any) -> Any:
        scale, zero = ranged(output.detach())
        inside = output.clamp(-zero * scale, (255 - zero) * scale)
        steps = ((inside.detach() / scale).round() + zero).clamp(0, 255)
        return inside + ((steps - zero) * scale - inside).detach()

    def fused(output: Any) -> Any:
        scale, zero = ranged(output.detach())
        return torch.fake_quantize_per_tensor_affine(output, scale, zero.int(), 0, 255)

    def add(name: str, model: Any) -> None:
        ways.add(name, lambda: model(subject.x), lambda: {"output": model(subject.x)})

    with threads(1):
        for name, edit in (("by hand", plainly), ("by hand, fake_quantize", fused)):
            model = subject.make()
            by_hand.edits(model, nn.ReLU, edit)
            add(name, model)
        ours = subject.make()
        hooked(ways, ours, select="type:ReLU", action="quantize")
        add(OURS, ours)
        return measured("mlp of width 512, quantize 7 ReLU outputs", ways, settings, target=1.05)


def weight_mlp(settings: Settings) -> Result:
    """mlp, scale 8 weights as they are read."""
    from torch.func import functional_call

    ways, subject = Ways(), mlp()
    x, hand, ours = subject.x, subject.make(), subject.make()
    weights = {name: each for name, each in hand.named_parameters() if name.endswith("weight")}
    hooked(ways, ours, select="**.weight", hook="weight", action="scale", factor=0.5)

    def by_call() -> Any:
        return functional_call(hand, {name: each * 0.5 for name, each in weights.items()}, (x,))

    def step(model: Any, call: Callable[[], Any]) -> Outputs:
        def outputs() -> dict[str, Any]:
            model.zero_grad()
            call().sum().backward()
            return {name: each.grad for name, each in model.named_parameters()}

        return outputs

    with threads(1):
        for name, model, call in (("functional_call", hand, by_call), (OURS, ours, lambda: ours(x))):
            outputs = step(model, call)
            ways.add(name, outputs, outputs)
        work = "mlp, scale 8 weights as they are read, forward + backward"
        return measured(work, ways, settings, target=1.05)


def capture_resnet18(settings: Settings) -> Result:
    """resnet18, capture 52 leaves."""
    with threads(2, grad=False):
        ways = capture_ways(resnet18(), settings)
        result = measured("resnet18, capture 52 leaves", ways, settings, target=None, slow=True)
    cloned = next(timing.ratio for timing in result.timings if timing.name == "by hand, cloned")
    return replace(result, target=round(cloned, 3))


def capture_gpt2(settings: Settings) -> Result:
    """gpt2, capture 41 leaves."""
    work, target = "gpt2 of 4 layers, capture 41 leaves", 1.02
    if importlib.util.find_spec("transformers") is None:
        return Result(work, "bare", target, (), missing={"transformers": "not installed"})
    with threads(2, grad=False):
        return measured(work, capture_ways(gpt2(), settings), settings, target=target, slow=True)


def fingerprints(of: str, **keys: Any) -> Callable[[Settings], Result]:
    """The function that measures a row with fingerprints of the outputs of all leaves of gpt2."""

    def measure(settings: Settings) -> Result:
        count = 40 if of == "token" else 41
        work, target = f"gpt2 of 4 layers, fingerprints of {count} leaves, of each {of}", 1.10
        if importlib.util.find_spec("transformers") is None:
            return Result(work, "bare", target, (), missing={"transformers": "not installed"})
        subject = gpt2()
        names = running(subject)
        if of == "token":
            names.remove("transformer.wpe")  # it sees positions, whatever the tokens are
        with threads(2, grad=False):
            ways, bare, ours = Ways(), subject.make(), subject.make()
            _, outputs = by_hand.captures(subject.make(), names, subject.x, clone=True)
            reduce = {"fingerprint": 64}
            kept = hooked(ways, ours, select=names, action="capture", reduce=reduce, **keys).captures["bench"]
            run, prints = by_hand.kept_by({name: kept[name] for name in names}, lambda: ours(subject.x))
            ways.add("bare", lambda: bare(subject.x))
            ways.outputs["by hand"] = lambda: {name: each.norm() for name, each in outputs().items()}
            ways.add(OURS, run, lambda: {name: each[:, 64].norm() for name, each in prints().items()})
            return measured(work, ways, settings, target=target, slow=True)

    measure.__name__ = f"fingerprints_of_{of}s"
    return measure


def compiled(name: str, hook: dict[str, Any]) -> Callable[[Settings], Result]:
    """The function that measures a row with a compiled model of width 512."""

    def measure(settings: Settings) -> Result:
        import torch

        subject = mlp(width=512, batch=256)
        bare, eager, ours = subject.make(), subject.make(), subject.make()
        ways = Ways()
        hooked(ways, eager, **hook)
        hooks = hooked(ways, ours, **hook)
        work = f"compiled mlp of width 512, {name}"
        try:
            with threads(2, grad=False):
                torch._dynamo.reset()
                fast = hooks.compile(fullgraph=True)  # first, because it discards all compiled graphs
                fast_bare = torch.compile(bare, fullgraph=True)
                x = subject.x
                ways.add("compiled, bare", lambda: fast_bare(x))
                ways.outputs["eager"] = lambda: {"output": eager(x)}
                ways.add(OURS, lambda: fast(x), lambda: {"output": fast(x)})
                fast_bare(x), fast(x)
                return measured(work, ways, settings, target=1.02)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            ways.stack.close()
            return Result(
                work, "compiled, bare", 1.02, (), missing={"torch.compile": str(error).splitlines()[0]}
            )

    measure.__name__ = f"compiled_{name.split()[0]}"
    return measure


WITH_PEERS = (capture_mlp, clamp_mlp, capture_resnet18, capture_gpt2)
ROWS = (
    capture_mlp_inference,
    scale_mlp,
    gradient_mlp,
    quantize_mlp,
    weight_mlp,
    early_exit_resnet18,
    fingerprints("sample"),
    fingerprints("token", tokens="all"),
    compiled("scale 8 Linear outputs", {"select": "type:Linear", "action": "scale", "factor": 2.0}),
    compiled("clamp all ReLU outputs", {"select": "type:ReLU", "action": "clamp", "min": 0, "max": 1}),
    compiled("bias added to one output", {"select": "7", "action": "add_bias", "value": 0.5}),
)
