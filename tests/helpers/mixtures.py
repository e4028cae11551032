"""Small mixtures of experts: of transformers, with experts dropped by hand, and one of torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 16, "vocab_size": 40,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 2, "moe_intermediate_size": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "deepseek_v3": {**_SIZES, **_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3},
}  # fmt: skip
ROUTERS = {"mixtral": 2, "qwen2_moe": 2, "deepseek_v3": 1}


def random_mixture(name: str, **more: Any) -> nn.Module:
    import transformers

    auto: Any = transformers

    torch.manual_seed(0)
    config = auto.AutoConfig.for_model(name, **FAMILIES[name], use_cache=False, **more)
    model: nn.Module = auto.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # large enough that a mistake shows
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def tokens(rows: int = 2) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(40, (rows, 5), generator=torch.Generator().manual_seed(2))}


def ends_with(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    return ((path, module) for path, module in model.named_modules() if path.split(".")[-1] == name)


def drop_by_hand(model: nn.Module, dropped: set[int], *, renormalize: bool) -> None:
    """Give the experts of a model of transformers a forward that computes token by token, without the dropped ones."""

    def forward_of(experts: Any) -> Any:
        def forward(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            rows = list[Tensor]()
            for token, chosen, shares in zip(x, indices.tolist(), weights, strict=True):
                kept = [
                    (number, share)
                    for number, share in zip(chosen, shares, strict=True)
                    if number not in dropped
                ]
                total = torch.zeros_like(token)
                for number, share in kept:
                    gate, up = (experts.gate_up_proj[number] @ token).chunk(2)
                    total = total + share * (experts.down_proj[number] @ (functional.silu(gate) * up))
                if renormalize and kept:
                    total = total * (shares.sum() / sum(share for _, share in kept))
                rows.append(total)
            return torch.stack(rows)

        return forward

    for _, experts in ends_with(model, "experts"):
        experts.forward = forward_of(experts)


class Router(nn.Module):
    """Scores, weights and indices of the k largest."""

    def __init__(self, width: int, experts: int, k: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, experts)
        self.k = k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.scores(x)
        best = scores.softmax(-1).topk(self.k, dim=-1)
        return scores, best.values, best.indices


class AllExperts(nn.Module):
    """Computes every expert, without a branch; the weights of those that were not chosen are 0."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width, width))

    def forward(self, x: Tensor, *, chosen: Tensor, shares: Tensor) -> Tensor:
        of_all = x.new_zeros(*x.shape[:-1], len(self.weight)).scatter(-1, chosen, shares)
        return torch.einsum("...h,ehf,...e->...f", x, self.weight, of_all)


class Mixture(nn.Module):
    """[batch, tokens, width], of torch alone; the experts get their arguments by name."""

    def __init__(self, width: int = 4, experts: int = 5, k: int = 2) -> None:
        super().__init__()
        self.router = Router(width, experts, k)
        self.experts = AllExperts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        _, shares, chosen = self.router(x)
        mixed: Tensor = self.experts(x, chosen=chosen, shares=shares)
        return mixed
