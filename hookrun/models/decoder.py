"""The small language model `decoder`: a GPT-2-like decoder with a module at every place that can be hooked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from hookrun.models.arguments import Size

Layers = Annotated[int, Field(ge=1, le=256, strict=True)]
Heads = Annotated[int, Field(ge=1, le=1024, strict=True)]

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
}


class Decoder(nn.Module):
    """A decoder from token ids to logits of the next token.

    `x = embed + pos_embed`, then each block adds to x what its attention and its MLP compute, then
    `unembed(ln_final(x))`. In a block: `ln1`, `attn` (`q`, `k`, `v`, `scores`, `pattern`, `z`, `heads`, `out`),
    `resid_mid` (x with the attention added), `ln2`, `mlp` (`pre`, `act`, `out`), `resid_post` (with the MLP added);
    without an MLP `resid_post` is x with the attention added, and there is no `resid_mid`.

    vocab_size: number of tokens; by default from the data set
    length:     the largest number of positions; by default from the data set
    width:      width of the residual stream; a multiple of `heads`
    layers:     number of blocks
    heads:      attention heads of a block
    mlp:        whether blocks have one; false: an attention-only model
    mlp_width:  hidden width of the MLP; null: four times `width`
    activation: activation of the MLP; gelu_tanh is that of GPT-2
    positions:  learned: a learned vector for each position is added to the embedding; rotary: queries and keys are
                rotated
    """

    def __init__(
        self,
        vocab_size: Size,
        length: Size,
        width: Size = 64,
        layers: Layers = 2,
        heads: Heads = 4,
        mlp: bool = True,
        mlp_width: Size | None = None,
        activation: Literal["relu", "gelu", "gelu_tanh"] = "gelu_tanh",
        positions: Literal["learned", "rotary"] = "learned",
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        if positions == "rotary" and (width // heads) % 2:
            raise ValueError(f"rotary positions need an even width of each head, found {width // heads}")
        self.config = SimpleNamespace(  # the names that configurations of transformers have
            vocab_size=vocab_size,
            max_position_embeddings=length,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
        )
        learned = positions == "learned"
        self.embed = nn.Embedding(vocab_size, width)
        self.pos_embed = nn.Embedding(length, width) if learned else None
        hidden = (mlp_width or 4 * width) if mlp else None
        self.blocks = nn.ModuleList(
            DecoderBlock(width, heads, hidden, activation, rotary=not learned) for _ in range(layers)
        )
        self.ln_final = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, vocab_size, bias=False)
        self.apply(_initialize)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Token ids [batch, length] to scores [batch, length, vocab_size].

        attention_mask: [batch, length], 1 for a real token and 0 for padding, on either side; None: all are real
        position_ids:   [batch, length], counted from 0; None: from each sequence's first real token
        """
        length = input_ids.shape[1]
        most = self.config.max_position_embeddings
        if length > most:
            raise ValueError(f"the sequences have {length} tokens, and the decoder has {most} positions")
        if position_ids is None:
            position_ids = _positions(input_ids, attention_mask)
        x: Tensor = self.embed(input_ids)
        if self.pos_embed is not None:
            x = x + self.pos_embed(position_ids)
        allowed = _allowed(length, attention_mask, x.device)
        for block in self.blocks:
            x = block(x, allowed, position_ids)
        return self.unembed(self.ln_final(x))


class DecoderBlock(nn.Module):
    """One layer: x + attention, then + MLP."""

    def __init__(
        self, width: int, heads: int, mlp_width: int | None, activation: str, *, rotary: bool
    ) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, rotary=rotary)
        if mlp_width is not None:
            self.resid_mid = SumOfTwo()
            self.ln2 = nn.LayerNorm(width)
            self.mlp = FeedForward(width, mlp_width, activation)
        self.has_mlp = mlp_width is not None
        self.resid_post = SumOfTwo()

    def forward(self, x: Tensor, allowed: Tensor, position_ids: Tensor) -> Tensor:
        """The residual stream [batch, length, width] with this layer's part added."""
        attended = self.attn(self.ln1(x), allowed, position_ids)
        if self.has_mlp:
            x = self.resid_mid(x, attended)
            attended = self.mlp(self.ln2(x))
        return self.resid_post(x, attended)


class Attention(nn.Module):
    """Causal self-attention; every intermediate value is the output of a module.

    `q`, `k`, `v`, `z`: [batch, position, head, width of a head]; queries and keys before they are rotated
    `scores`:  [batch, head, query, key], where masked keys have the smallest number of the dtype
    `pattern`: the scores after the softmax
    `heads`:   [batch, position, head, width]: what each head adds to the residual stream
    `out`:     their sum, with the bias
    """

    def __init__(self, width: int, heads: int, *, rotary: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (ToHeads(width, heads) for _ in range(3))
        self.scores = nn.Identity()
        self.pattern = nn.Softmax(dim=-1)
        self.z = nn.Identity()
        self.heads = FromHeads(width, heads)
        self.out = SumOfHeads(width)
        self.rotary = rotary
        self.scale = (width // heads) ** -0.5

    def forward(self, x: Tensor, allowed: Tensor, position_ids: Tensor) -> Tensor:
        """[batch, length, width] to the same; `allowed` [batch or 1, 1, query, key]: the keys that a query may see."""
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        if self.rotary:
            q = rotated(q, position_ids)
            k = rotated(k, position_ids)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        pattern = self.pattern(self.scores(scores))
        z = self.z(torch.einsum("bhqk,bkhd->bqhd", pattern, v))
        return self.out(self.heads(z))


class ToHeads(nn.Linear):
    """[..., width] to [..., heads, width of a head]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (self.heads, -1))


class FromHeads(nn.Module):
    """[..., heads, width of a head] to [..., heads, width]: the output projection, each head by itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, width // heads, width))

    def forward(self, z: Tensor) -> Tensor:
        return torch.einsum("...hd,hdw->...hw", z, self.weight)


class SumOfHeads(nn.Module):
    """[..., heads, width] to [..., width]: the sum over the heads, and the bias of the output projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, parts: Tensor) -> Tensor:
        return parts.sum(-2) + self.bias


class FeedForward(nn.Module):
    """Two linear layers, `pre` and `out`, with the activation `act` between them."""

    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.pre = nn.Linear(width, hidden)
        self.act = _ACTIVATIONS[activation]()
        self.out = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.pre(x)))


class SumOfTwo(nn.Module):
    """The sum of two tensors, as a module, so that a hook can be placed on it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def rotated(x: Tensor, position_ids: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of [batch, position, head, width].

    The first and the second half of the width are the two coordinates, as in Llama.
    """
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = (position_ids[:, :, None].float() * base**-steps)[:, :, None, :]
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _positions(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """[batch or 1, length]: the index of each token among the real ones of its sequence; 0 for padding before them."""
    if attention_mask is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def _allowed(length: int, attention_mask: Tensor | None, device: torch.device) -> Tensor:
    """[batch or 1, 1, query, key], true where the key is real and not after the query."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    return causal if attention_mask is None else causal & attention_mask.bool()[:, None, None, :]


def _initialize(module: nn.Module) -> None:
    """The normal distribution of GPT-2 for weights, zeros for biases."""
    if isinstance(module, nn.Linear | nn.Embedding | FromHeads):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
