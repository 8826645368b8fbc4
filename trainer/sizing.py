"""What a training run will take, by formula, before a GPU is booked: `gristmill train CONFIG --plan`.

    plan = size(config, vocab_size=50_257, gpu="h100", mfu=0.4)
    plan.hours, plan.memory.total, plan.fits

Activations are what the backward pass of `model.py` keeps, counted tensor by tensor; the tests compare the count with
what torch really saves. Left out: the allocator's slack, the caches of the matrix libraries and the CUDA context,
together 1 to 3 GB on a GPU; hence HEADROOM.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass

import torch

from gristmill.trainer.attention import by_products
from gristmill.trainer.config import ModelShape, TrainConfig, TrainError
from gristmill.trainer.loss import PROJECT_ROWS, rows_at_once
from gristmill.trainer.model import count_parameters, flops_per_token, parameter_shapes
from gristmill.trainer.recompute import Recompute

HEADROOM = 0.9  # of a GPU's memory that the formula may fill
BYTES = {"float32": 4, "bf16": 2}


@dataclass(frozen=True)
class Gpu:
    """Dense peaks without sparsity, FLOP/s, and memory."""

    bf16: float
    float32: float | None  # without TF32; None: not in our source
    memory_bytes: float
    names: tuple[str, ...]  # parts of the device's name, all of which it has


# Peaks without sparsity. Those of A100, H100, H200, B200, L40S and MI300X are as torchtitan and LitGPT have them in
# their tables, which name the vendors' data sheets; the rest are from memory of the data sheets: set --mfu by them.
GPUS: dict[str, Gpu] = {
    "a100-40gb": Gpu(312e12, 19.5e12, 40e9, ("A100", "40GB")),
    "a100-80gb": Gpu(312e12, 19.5e12, 80e9, ("A100",)),
    "h100-pcie": Gpu(756e12, 51e12, 80e9, ("H100", "PCIe")),
    "h100": Gpu(989e12, 67e12, 80e9, ("H100",)),  # SXM
    "h200": Gpu(989e12, 67e12, 141e9, ("H200",)),  # SXM
    "b200": Gpu(2250e12, None, 180e9, ("B200",)),
    "l40s": Gpu(362e12, 91.6e12, 48e9, ("L40S",)),
    "l4": Gpu(121e12, 30.3e12, 24e9, ("L4",)),
    "rtx-4090": Gpu(165e12, 82.6e12, 24e9, ("RTX 4090",)),
    "mi300x": Gpu(1307e12, 163e12, 192e9, ("MI300X",)),
}


def peak_of(device_name: str, dtype: str) -> float | None:
    """FLOP/s of a device as torch names it; None where the table does not have it."""
    words = device_name.replace("-", " ").split()
    for gpu in GPUS.values():
        if all(name in words or (" " in name and name in device_name) for name in gpu.names):
            return gpu.bf16 if dtype == "bf16" else gpu.float32
    return None


def measured_peak(device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 0.2) -> float:
    """FLOP/s of the best of several products of two square matrices: what a training could reach here at most."""
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out, best, until = a @ b, float("inf"), time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        best = min(best, now - began)
        if now > until:
            return 2.0 * size**3 / best


def device_peak(device: torch.device, dtype: str) -> float:
    """FLOP/s of a device: the table's, or what a product reaches now. All ranks of a machine measure together."""
    known = peak_of(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return known or measured_peak(device, torch.bfloat16 if dtype == "bf16" else torch.float32, seconds=0.05)


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilo = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilo * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the fullest moment, the end of the forward pass with gradients of an earlier part there."""

    parameters: float  # float32 masters, sharded
    gradients: float  # float32, sharded
    optimizer: float  # two moments, with Muon one of a block's matrix, float32, sharded
    gathered: float  # whole weights in the activations' dtype, and a block's whole gradient
    activations: float  # kept for the backward pass of one micro-batch
    loss: float  # of the output layer: gradient of its matrix, and pieces of logits

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def activation_values(shape: ModelShape, recompute: Recompute = "none", tensor: int = 1) -> float:
    """Numbers that one block keeps for one token on one of `tensor` ranks.

    none: of the residual's width ten: for each of the two norms its input, and the scaled input before and after the
    gain (a GPU's fused norm keeps one of the two); queries, keys and values repeated for all heads, for so attention
    takes them; its output. Of the feed-forward part gate, up, silu of the gate, and the product. qk-norm keeps queries
    and keys twice more. Split over the ranks is what belongs to heads and hidden units.
    selective: the block's input, and the result of each product and of attention. full: the input.
    """
    width, kv = shape.width, shape.width * shape.kv_heads // shape.heads
    if recompute == "full":
        return width
    if recompute == "selective":
        return 3 * width + (2 * width + 2 * kv + 2 * shape.hidden) / tensor
    return 6 * width + (4 * width + 4 * shape.hidden + (2 * (width + kv) if shape.qk_norm else 0)) / tensor


def activation_values_of_all(shape: ModelShape, config: TrainConfig) -> float:
    """Numbers kept for one token at the fullest moment: those of all blocks, what is made again of one, the ends."""
    kept = activation_values(shape, config.recompute, config.tensor)
    whole = activation_values(shape, "none", config.tensor)
    again = {"none": 0.0, "selective": whole - kept, "full": whole}[config.recompute]
    return shape.layers * kept + again + 3 * shape.width


def memory(shape: ModelShape, config: TrainConfig) -> Memory:
    """shape: resolved."""
    size, shards = BYTES[config.dtype], config.data_ranks // config.copies
    matrices = sum(math.prod(s) for n, s in parameter_shapes(shape) if len(s) == 2 and n.startswith("layers."))
    outside = shape.vocab_size * shape.width * (1 if shape.tied else 2) + shape.width
    # What one data rank has to know of the model: tensor ranks share the matrices of the blocks.
    count = count_parameters(shape) - matrices + matrices / config.tensor
    block = (count - outside) / shape.layers
    muon = matrices / config.tensor if config.optimizer == "muon" else 0
    if config.ranks == 1:
        gathered = count * size if size < 4 else 0.0  # cast where they are used, and kept for the backward pass
    elif config.device == "cpu":
        gathered = count * size + block * 4
    else:
        gathered = (outside + 2 * block) * size + block * 4  # the next block comes while one is computed
    tokens = (config.micro_windows or config.batch_windows // config.data_ranks) * config.seq_len
    mask: float = config.seq_len * tokens if config.mask_documents and config.device == "cpu" else 0
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    if config.compile and by_products(dtype, config.seq_len, torch.device(config.device)):
        alive = shape.layers if config.recompute == "none" else 1
        mask += alive * tokens * config.seq_len * shape.heads / config.tensor * size  # `attention` stores its shares
    pieces = rows_at_once(tokens, shape.vocab_size) * size + 2 * PROJECT_ROWS * 4  # for each id of the vocabulary
    return Memory(
        parameters=count * 4 / shards,
        gradients=count * 4 / shards,
        optimizer=(count * 8 - muon * 4) / shards,
        gathered=gathered,
        activations=tokens * size * activation_values_of_all(shape, config) + mask,
        loss=shape.vocab_size * (shape.width * 4 + pieces),
    )


@dataclass(frozen=True)
class Sizing:
    """The plan of a run."""

    shape: ModelShape
    config: TrainConfig
    gpu: str
    mfu: float  # share of the peak that is assumed
    parameters: int
    flops_per_token: float
    memory: Memory

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.config.total_tokens

    @property
    def hours(self) -> float:
        """Of the whole run on `ranks` GPUs. Raises TrainError where the table has no peak for the dtype."""
        peak = GPUS[self.gpu].bf16 if self.config.dtype == "bf16" else GPUS[self.gpu].float32
        if peak is None:
            raise TrainError(f"The table has no float32 peak of {self.gpu}. Set `dtype: bf16`, or name another GPU.")
        return self.flops / (peak * self.mfu * self.config.ranks) / 3600

    @property
    def mesh(self) -> str:
        """How the ranks share the work, in words."""
        config = self.config
        shards = config.data_ranks // config.copies
        parts = [f"{config.copies} copies" if config.copies > 1 else "one copy", f"{shards} shards each"]
        parts += [f"{config.tensor} tensor ranks"] if config.tensor > 1 else []
        return f"{config.parallel}: {' x '.join(parts)}; recompute {config.recompute}"

    @property
    def fits(self) -> bool:
        return self.memory.total <= HEADROOM * GPUS[self.gpu].memory_bytes

    def table(self) -> str:
        """Lines of text, with a warning last where it does not fit."""
        shape, config, gpu = self.shape, self.config, GPUS[self.gpu]
        lines = [
            f"parameters        {self.parameters:,} ({shape.layers} layers of width {shape.width:,})",
            f"tokens            {config.total_tokens:,} = {config.total_steps:,} steps of {config.tokens_per_step:,}",
            f"tokens/parameter  {config.total_tokens / self.parameters:.1f}",
            f"FLOPs             {self.flops:.3g} ({self.flops_per_token:.3g} a token: 6 a weight, and attention)",
            f"time              {self.hours:,.2f} hours on {config.ranks} x {self.gpu} at {self.mfu:.0%} of its peak "
            f"in {config.dtype}; {self.hours * config.ranks:,.2f} GPU hours",
            f"mesh              {self.mesh}",
            f"memory a rank     {self.memory.total / 1e9:.2f} GB of {gpu.memory_bytes / 1e9:.0f} GB",
            *(f"  {name:<16}{value / 1e9:.2f} GB" for name, value in vars(self.memory).items()),
        ]
        if not self.fits:
            lines.append(
                f"It will not fit: more than {HEADROOM:.0%} of the memory of {self.gpu}. Lower micro_windows (now "
                f"{config.micro_windows or config.batch_windows // config.data_ranks} windows at a time), recompute "
                f"more (now {config.recompute}), raise ranks, keep fewer copies of the weights, take bf16, or name a "
                "larger GPU."
            )
        return "\n".join(lines) + "\n"

    def data(self) -> dict[str, object]:
        """The same for programs."""
        return {
            "parameters": self.parameters,
            "tokens": self.config.total_tokens,
            "steps": self.config.total_steps,
            "flops_per_token": self.flops_per_token,
            "flops": self.flops,
            "mesh": self.mesh,
            "gpu": self.gpu,
            "mfu": self.mfu,
            "hours": self.hours,
            "memory_bytes": {**vars(self.memory), "total": self.memory.total},
            "fits": self.fits,
        }


def size(config: TrainConfig, vocab_size: int = 0, gpu: str = "h100", mfu: float = 0.4) -> Sizing:
    """vocab_size: of the tokenizer; 0 where the shape says it. Raises TrainError for what is not known."""
    if gpu not in GPUS:
        raise TrainError(f"There is no GPU {gpu!r} in the table. It has: {', '.join(GPUS)}.")
    if not 0 < mfu <= 1:
        raise TrainError(f"A share of the peak of {mfu:g} is none: give a number above 0 and up to 1, such as 0.4.")
    if not (vocab_size or config.shape.vocab_size):
        raise TrainError("The vocabulary is not known. Name token shards with --tokens, or set model.vocab_size.")
    shape = config.shape.resolved(vocab_size or config.shape.vocab_size)
    flops = flops_per_token(shape, config.seq_len)
    return Sizing(shape, config, gpu, mfu, count_parameters(shape), flops, memory(shape, config))
