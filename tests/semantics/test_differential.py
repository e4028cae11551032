"""Random models with random hooks give the same results as with hand-registered PyTorch hooks.

`PYTHONPATH=tests/helpers python tests/semantics/test_differential.py COUNT [SEED]` tries COUNT models, from SEED on.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from small_nets import Net
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import hookrun

WIDTH = 3
MODELS = 200


def test_hundreds_of_models_give_what_hooks_by_hand_give() -> None:
    assert list(failures(range(MODELS))) == []


# ---- random models ---------------------------------------------------------------------------------------------


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def pair() -> Net:
    """Returns a tuple, which `join` sums."""
    return Net(lambda m, x: (m.left(x), m.right(x) * 2), left=linear(), right=linear())


def named() -> Net:
    """Returns a dict, with an entry without gradient."""
    return Net(lambda m, x: {"h": m.inner(x), "count": torch.tensor(len(x))}, inner=linear())


def join(model: Any, x: Tensor) -> Tensor:
    value = model.source(x)
    return value[0] + value[1] if isinstance(value, tuple) else value["h"]


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


def in_place() -> Net:
    """Writes in place into the output of the module before it."""
    act = nn.LeakyReLU(0.1, inplace=True)
    return Net(lambda m, x: m.act(m.linear(x).mul_(1.5)), linear=linear(), act=act)


def reused() -> Net:
    return Net(lambda m, x: m.shared(torch.tanh(m.shared(x))), shared=linear())


def keyword() -> Net:
    scaled = Net(lambda _, x, *, factor: x * (factor + 2))
    return Net(lambda m, x: m.inner(x, factor=x.detach().mean()), inner=scaled)


def block(rng: random.Random, depth: int) -> nn.Module:
    makers: list[Callable[[], nn.Module]] = [
        linear,
        lambda: nn.Sequential(linear(), nn.ReLU(inplace=rng.random() < 0.5)),
        nn.Tanh,
        nn.Identity,
        lambda: nn.Dropout(0.0),
        lambda: nn.LayerNorm(WIDTH),
        in_place,
        reused,
        keyword,
        lambda: Net(join, source=pair()),
        lambda: Net(join, source=named()),
    ]
    if depth:
        makers += [
            lambda: Net(lambda m, x: x + m.body(x), body=block(rng, depth - 1)),
            lambda: nn.Sequential(*(block(rng, depth - 1) for _ in range(rng.randint(1, 3)))),
            lambda: Checkpointed(block(rng, depth - 1)),
        ]
    return rng.choice(makers)()


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    blocks = [block(rng, 2) for _ in range(rng.randint(1, 4))]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks).to(dtype_of(seed))


def dtype_of(seed: int) -> torch.dtype:
    return torch.float32 if seed % 4 == 3 else torch.float64


# ---- random hooks, and the same by hand ------------------------------------------------------------------------

EDITS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "scale": ({"factor": 1.5}, lambda x: x * 1.5),
    "clamp": ({"min": -0.5, "max": 0.7}, lambda x: x.clamp(-0.5, 0.7)),
    "add_bias": ({"value": [0.1, 0.0, -0.2]}, lambda x: x + torch.tensor([0.1, 0.0, -0.2], dtype=x.dtype)),
    "replace": ({"value": 0.25}, lambda x: torch.full_like(x, 0.25)),
}


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return tree_map_only(Tensor, lambda x: change(x) if x.is_floating_point() else x, value)


class EditGradient(torch.autograd.Function):
    """The identity with an edited gradient: the definition of `output_grad`, with a copy instead of an alias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edit: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.edit = edit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.edit(grad), None


class ByHand:
    """Hooks registered by hand, in the same order."""

    def __init__(self, model: nn.Module, spec: dict[str, dict[str, Any]]) -> None:
        self.seen = dict[tuple[str, str], list[Any]]()
        self.in_backward = False
        self.handles: list[Any] = []
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        self.at_step: list[tuple[nn.Parameter, Callable[[Tensor], Tensor]]] = []
        self.accumulated: list[tuple[nn.Parameter, Callable[[Tensor], Tensor]]] = []
        for kind in ("forward_pre", "forward"):  # edits first, then hooks on the final output
            for name, hook in spec.items():
                if hook["hook"] == kind:
                    self.on_module(name, hook)
        for name, hook in reversed(spec.items()):  # the outermost node sees the gradient first
            if hook["hook"] == "output_grad":
                self.on_module(name, hook)
        for name, hook in spec.items():
            if hook["select"] in self.parameters:
                self.on_parameter(name, hook)

    def see(self, name: str, path: str, value: Any) -> None:
        if not self.in_backward:
            self.seen.setdefault((name, path), []).append(each_tensor(value, lambda x: x.detach().clone()))

    def on_gradient(self, name: str, hook: dict[str, Any]) -> Callable[[Tensor], Tensor]:
        def act(grad: Tensor) -> Tensor:
            if hook["action"] == "capture":
                self.seen.setdefault((name, hook["select"]), []).append(grad.detach().clone())
                return grad
            return EDITS[hook["action"]][1](grad)

        return act

    def on_module(self, name: str, hook: dict[str, Any]) -> None:
        path = hook["select"]
        module = self.modules[hook["select"]]
        edit = EDITS[hook["action"]][1] if hook["action"] != "capture" else None

        def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if edit is not None:
                return each_tensor((args, kwargs), edit)
            shown = {**dict(enumerate(args)), **kwargs} if kwargs else args[0] if len(args) == 1 else args
            return self.see(name, path, shown)

        def forward(module: nn.Module, args: Any, output: Any) -> Any:
            return self.see(name, path, output) if edit is None else each_tensor(output, edit)

        def output_grad(module: nn.Module, args: Any, output: Any) -> Any:
            look = self.on_gradient(name, hook)
            return each_tensor(output, lambda x: EditGradient.apply(x, look) if x.requires_grad else x)  # type: ignore[no-any-return]

        if hook["hook"] == "forward_pre":
            self.handles.append(module.register_forward_pre_hook(pre, with_kwargs=True))
        else:
            chosen = forward if hook["hook"] == "forward" else output_grad
            self.handles.append(module.register_forward_hook(chosen))

    def on_parameter(self, name: str, hook: dict[str, Any]) -> None:
        parameter = self.parameters[hook["select"]]
        act = self.on_gradient(name, hook)
        if hook["hook"] == "grad":
            self.handles.append(parameter.register_hook(act))
        elif hook["hook"] == "post_accumulate_grad":
            self.accumulated.append((parameter, act))
        else:
            self.at_step.append((parameter, act))

    def after_accumulation(self) -> None:
        """Run the hooks that hookrun runs in the last micro-batch's backward and before the optimizer's step."""
        with torch.no_grad():
            for parameter, act in (*self.accumulated, *self.at_step):
                if parameter.grad is not None:
                    parameter.grad.copy_(act(parameter.grad))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def spec_of(seed: int, model: nn.Module) -> dict[str, dict[str, Any]]:
    rng = random.Random(seed + 1)
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    inside_checkpoint = set[str]()
    for path, module in model.named_modules():
        if isinstance(module, Checkpointed):
            inside_checkpoint |= {f"{path}.{name}" for name, _ in module.body.named_modules(prefix="body")}
    spec = dict[str, dict[str, Any]]()
    for number in range(rng.randint(1, 5)):
        on_module = rng.random() < 0.75
        kind = rng.choice(
            ["forward_pre", "forward", "output_grad"]
            if on_module
            else ["grad", "post_accumulate_grad", "optimizer_step_pre"]
        )
        select = rng.choice(modules if on_module else parameters)
        if select in inside_checkpoint and kind == "output_grad":
            continue  # a hook by hand fires in the recomputation; see test_activation_checkpointing.py
        action = rng.choice(["capture", *EDITS])
        keys = EDITS[action][0] if action in EDITS else {}
        if action == "add_bias" and not on_module:
            action = "scale"
            keys = EDITS["scale"][0]
        if action == "add_bias" and kind == "forward_pre" and "inner" in select:
            action = "scale"
            keys = EDITS["scale"][0]  # the keyword argument is a 0-dimensional tensor
        spec[f"h{number}"] = {"select": select, "hook": kind, "action": action, **keys}
    return spec


# ---- a run of both ---------------------------------------------------------------------------------------------


def trained(
    model: nn.Module, hooks: Any, by_hand: ByHand | None, steps: int = 2, micro: int = 2
) -> list[Tensor]:
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for number in range(micro):
            if hooks is not None:
                hooks.accumulating = number + 1 < micro
            x = torch.randn(2, WIDTH, dtype=next(model.parameters()).dtype, requires_grad=True)
            loss = model(x).square().sum()
            losses.append(loss.detach())
            if not loss.requires_grad:
                continue
            if by_hand is not None:
                by_hand.in_backward = True
            loss.backward()
            if by_hand is not None:
                by_hand.in_backward = False
            losses.append(torch.zeros(()) if x.grad is None else x.grad)
        if by_hand is not None:
            by_hand.after_accumulation()
        optimizer.step()
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if leaf is not None]


def close(mine: Tensor, theirs: Tensor) -> bool:
    """Whether two values are equal up to the rounding of sums in another order."""
    relative, absolute = (1e-3, 1e-4) if mine.dtype == torch.float32 else (1e-9, 1e-11)
    same = torch.allclose(mine.double(), theirs.double(), relative, absolute, equal_nan=True)
    return mine.dtype == theirs.dtype and same


def difference(seed: int) -> str | None:
    """How hookrun and hooks by hand differ on the model of this seed, or None."""
    spec = spec_of(seed, model_of(seed))
    one = model_of(seed)
    other = model_of(seed)
    by_hand = ByHand(one, spec)
    expected = trained(one, None, by_hand)
    by_hand.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hookrun.HookrunWarning)  # an edit may cut a gradient off
        try:
            with hookrun.hooked(other, spec) as hooks:
                found = trained(other, hooks, None)
        except hookrun.HookError as error:  # another hook has replaced all values by constants
            return None if "carries no gradient" in str(error) else str(error)
    if len(found) != len(expected):
        return f"{len(found)} results for {len(expected)}"
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine.shape != theirs.shape or not close(mine, theirs):
            return f"result {number}: {mine} for {theirs}"
    for name, hook in spec.items():
        if hook["action"] != "capture":
            continue
        mine = tensors_of(hooks.captures[name].get(hook["select"], []))
        theirs = tensors_of(by_hand.seen.get((name, hook["select"]), []))
        if len(mine) != len(theirs):
            return f"{name}: {len(mine)} captured tensors for {len(theirs)}"
        if not all(close(a, b) for a, b in zip(mine, theirs, strict=True)):
            return f"{name}: captures differ"
    return None


def failures(seeds: range) -> Iterator[str]:
    for seed in seeds:
        if (what := difference(seed)) is not None:
            yield f"seed {seed}: {what}\n  {spec_of(seed, model_of(seed))}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    count = 0
    for text in failures(range(first, first + int(sys.argv[1]))):
        count += 1
        print(text, flush=True)
    print(f"{count} differences")
