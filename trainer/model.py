"""One Llama-style model: RMSNorm, RoPE, SwiGLU, grouped-query attention, optionally tied embeddings and qk-norm.

Names and layouts of the weights are those of Hugging Face's LlamaForCausalLM without its `model.` prefix (with
`q_norm` and `k_norm`, those of Qwen3): query and key rows are ordered for RoPE on halves, linear weights are (out, in).
So an export copies tensors and nothing else.

Weights are cast to the activations' dtype where they are used. Under `fully_shard` with mixed precision they already
have it, on one rank the masters are cast: the same numbers either way, and no autocast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask

from gristmill.trainer.attention import Mask, added_mask, attend, by_products, mask_of
from gristmill.trainer.config import ModelShape
from gristmill.trainer.loss import token_nll, token_nll_each
from gristmill.trainer.parallel import part_of_rows, sum_of_parts
from gristmill.trainer.recompute import Recompute, recomputed


class Linear(nn.Linear):
    """x (..., n_in) -> (..., n_out), in the dtype of x. No bias, as in Llama."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: `initialise` fills what a model has."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rope_table(positions: int, head_width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i / head_width), each (positions, head_width) with the halves repeated."""
    inverse = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inverse  # (positions, half)
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (Su et al. 2021) on halves: x (batch, heads, positions, head_width), cos and sin of x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shared_by = shape.heads // shape.kv_heads  # heads that read one pair of keys and values
        self.head_width = shape.width // shape.heads
        self.q_proj = Linear(shape.width, shape.heads * self.head_width)
        self.k_proj = Linear(shape.width, shape.kv_heads * self.head_width)
        self.v_proj = Linear(shape.width, shape.kv_heads * self.head_width)
        self.o_proj = Linear(shape.heads * self.head_width, shape.width)
        self.q_norm = RMSNorm(self.head_width, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_width, shape.norm_eps) if shape.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        batch, positions, _ = x.shape
        # -1: all heads, or this rank's.
        q = self.q_proj(x).view(batch, positions, -1, self.head_width)
        k = self.k_proj(x).view(batch, positions, -1, self.head_width)
        v = self.v_proj(x).view(batch, positions, -1, self.head_width).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)  # (batch, heads, positions, head_width)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        if self.shared_by > 1:
            k, v = (part.repeat_interleave(self.shared_by, dim=1) for part in (k, v))
        y = attend(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).reshape(batch, positions, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.gate_proj = Linear(shape.width, shape.hidden)
        self.up_proj = Linear(shape.width, shape.hidden)
        self.down_proj = Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: ModelShape, recompute: Recompute = "none"):
        super().__init__()
        self.recompute: Recompute = recompute
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        return recomputed(self._forward, self.recompute, x, cos, sin, mask)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """shape: resolved (no zeros). dtype: of the activations; parameters are float32 as built. recompute: what the
    blocks do not keep for the backward pass."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype = torch.float32, recompute: Recompute = "none"):
        super().__init__()
        assert min(shape.vocab_size, shape.kv_heads, shape.hidden) > 0, "a shape must be resolved before it is built"
        self.shape, self.dtype = shape, dtype
        self.compiled = False
        self.tensor_mesh: DeviceMesh | None = None  # of the ranks that share the products of each block
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(Block(shape, recompute) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.lm_head = None if shape.tied else Linear(shape.width, shape.vocab_size)

    def compile_parts(self) -> None:
        """torch.compile of each block, and of the loss. All blocks share what is compiled."""
        for layer in self.layers:
            layer.compile()
        self.compiled = True

    @property
    def output_weight(self) -> Tensor:
        """(vocab, width)"""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """ids (batch, positions) int64 -> last hidden states (batch, positions, width).

        documents (batch, positions): a number for each document; attention then stays inside equal numbers.
        """
        positions = ids.shape[1]
        cos, sin = rope_table(positions, self.shape.width // self.shape.heads, self.shape.rope_base, ids.device)
        cos, sin = cos.to(self.dtype), sin.to(self.dtype)
        mask = mask_of(documents)
        if self.compiled and not isinstance(mask, BlockMask) and by_products(self.dtype, positions, ids.device):
            mask = added_mask(mask, positions)
        x = self.embed_tokens(ids).to(self.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def logits(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """(batch, positions) -> (batch, positions, vocab) in float32. For a look and for tests; training never asks."""
        x = self.hidden(ids, documents)
        return F.linear(x, self.output_weight.to(x.dtype)).float()

    def forward(
        self, ids: Tensor, targets: Tensor, documents: Tensor | None = None, z_loss: float = 0.0, each: bool = False
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Summed loss in nats and the z penalty: `loss.token_nll` of all positions. targets as ids, negative: ignore.

        With `each`, instead the nats of each target (batch, positions), 0 where it is ignored; for scoring, so without
        a gradient that costs little.
        """
        x = self.hidden(ids, documents).flatten(0, 1)
        weight = self.output_weight.to(x.dtype)
        if each:
            return token_nll_each(x, weight, targets.flatten()).view_as(targets)
        if self.tensor_mesh is None:
            return token_nll(x, weight, targets.flatten(), z_loss, self.compiled)
        nll, penalty = token_nll(*part_of_rows(x, weight, targets.flatten(), self.tensor_mesh), z_loss, self.compiled)
        return sum_of_parts(nll, self.tensor_mesh), sum_of_parts(penalty, self.tensor_mesh)


def initialise(model: Llama, seed: int) -> None:
    """Fills the parameters, each from a generator of its own that is keyed by seed and name.

    So the numbers do not depend on the number of ranks, on sharding, or on which other parameters exist. One
    parameter at a time is made whole on the CPU; a rank keeps its shard. Normal with `init_std`; the two matrices that
    write to the residual stream are divided by sqrt(2 * layers) (GPT-2, section 2.3); gains are 1.
    """
    shape = model.shape
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = shape.init_std
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * shape.layers)
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name, seed=seed & (2**64 - 1)) >> 1)
            whole = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            if isinstance(parameter, DTensor):
                whole = whole.to(parameter.device)
                parameter.copy_(
                    distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                )
            else:
                parameter.copy_(whole)


def parameter_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every parameter, without making one."""
    with torch.device("meta"):
        model = Llama(shape)
    for name, parameter in model.named_parameters():
        yield name, tuple(parameter.shape)


def count_parameters(shape: ModelShape) -> int:
    return sum(math.prod(size) for _, size in parameter_shapes(shape))


def flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token.

    6 for each weight that is multiplied (the output layer counts, the look-up of an embedding does not), and causal
    attention: 6 * layers * width * seq_len, half of PaLM's 12 (Chowdhery et al. 2022, appendix B), which counts the
    masked half too.
    """
    embedding = shape.vocab_size * shape.width
    multiplied = count_parameters(shape) - (0 if shape.tied else embedding)
    return 6.0 * multiplied + 6.0 * shape.layers * shape.width * seq_len
