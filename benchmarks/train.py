"""Training speed on a CPU: our loop beside a plain one in nanoGPT's manner, same shapes, same batches, interleaved.

    python benchmarks/train.py --shape 3m --threads 2
    python benchmarks/train.py --json

Both train for `--steps` steps per turn, `--rounds` turns each, one after the other, by the clock on the wall.
--corpus is accepted, as by every benchmark, and ignored: ids are random.

    train.3m         tokens/s of our step, and of the plain one in torch: what one writes by hand, the same
                     architecture in stock modules, full logits, F.cross_entropy, clip_grad_norm_,
                     torch.optim.AdamW(fused), autocast for bf16. Both start without weights from disk and without
                     data loading, so that only the step is compared; other shapes by --shape
    train.share_of_matrix_limit  our FLOP/s as a share of those of a bare matrix product of the model's shapes
    train.overhead   share of a real run of ours that is not the step: data, checks, logging, a checkpoint every 5
                     steps

What to expect: with AMX, 3m in bf16, 1.3 to 1.7 times the plain loop; the loss that never stores its logits makes most
of it. The limit is a bare matrix product of the model's shapes.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from common import OURS, Figure, arguments, compared, note, peer, rounds, show, speed
from torch import Tensor, nn

from gristmill.trainer.config import PRESETS, ModelShape
from gristmill.trainer.model import Llama, count_parameters, flops_per_token, initialise, rope_table, rotate
from gristmill.trainer.optim import AdamW, scale_gradients, squared_norm

VOCAB = 8_192


class PlainBlock(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.first, self.second = nn.RMSNorm(width, shape.norm_eps), nn.RMSNorm(width, shape.norm_eps)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, shape.hidden, bias=False), nn.Linear(width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, positions, width = x.shape
        q, k, v = (
            part.view(batch, positions, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.first(x)).split(width, dim=2)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, positions, width))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Plain(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.norm_eps)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=shape.init_std)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        head_width = self.shape.width // self.shape.heads
        cos, sin = rope_table(ids.shape[1], head_width, self.shape.rope_base, ids.device)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def plain_step(shape: ModelShape, dtype: torch.dtype) -> Callable[[Tensor], float]:
    model = Plain(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(ids: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def our_step(shape: ModelShape, dtype: torch.dtype) -> Callable[[Tensor], float]:
    model = Llama(shape, dtype)
    initialise(model, 1)
    optimizer = AdamW(model.named_parameters(), (0.9, 0.95), 1e-8, 0.1)

    def step(ids: Tensor) -> float:
        tokens = ids[:, 1:].numel()
        nll, _ = model(ids[:, :-1], ids[:, 1:].contiguous())
        (nll / tokens).backward()
        norm = float(squared_norm(optimizer.parameters.values())) ** 0.5
        if norm > 1.0:
            scale_gradients(optimizer.parameters.values(), 1.0 / (norm + 1e-6))
        optimizer.step(1e-3)
        optimizer.zero_grad()
        return float(nll.detach()) / tokens

    return step


def matrix_limit(shape: ModelShape, dtype: torch.dtype, rows: int) -> float:
    """FLOP/s of the model's largest products alone, median of a few."""
    rates = []
    for n_out in (shape.hidden, VOCAB):
        a, b = torch.randn(rows, shape.width).to(dtype), torch.randn(n_out, shape.width).to(dtype)
        times = []
        for _ in range(8):
            began = time.perf_counter()
            F.linear(a, b)
            times.append(time.perf_counter() - began)
        rates.append(2 * rows * shape.width * n_out / statistics.median(times))
    return statistics.mean(rates)


def overhead(shape: ModelShape, dtype: str, batch: int, seq_len: int) -> float:
    """Share of a real run's time that is not the step: data, checks, logging, checkpoints."""
    from gristmill.trainer import train
    from gristmill.trainer.config import Run, TrainConfig
    from gristmill.trainer.group import ALONE

    with tempfile.TemporaryDirectory() as folder:
        tokens = _random_tokens(Path(folder), batch * seq_len * 12)
        (Path(folder) / "all.yaml").write_text("name: all\nmax_epochs: 100\nsources: {all: 1}\n")
        config = TrainConfig(
            model=shape, seq_len=seq_len, batch_windows=batch, steps=10, dtype=dtype, checkpoint_every=5, eval_every=0
        )
        out = Path(folder) / "out"
        out.mkdir()
        run = Run(config=config, mixture=str(Path(folder) / "all.yaml"), tokens=str(tokens), out=str(out))
        inside = [0.0]
        real = train.step, train.update

        def timed(index: int) -> Callable:
            def call(*arguments: object) -> object:
                began = time.perf_counter()
                result = real[index](*arguments)
                inside[0] += time.perf_counter() - began
                return result

            return call

        train.step, train.update = timed(0), timed(1)
        try:
            job = train.prepare(run, ALONE)
            began = time.perf_counter()
            train.loop(job)
            return 1 - inside[0] / (time.perf_counter() - began)
        finally:
            train.step, train.update = real


def _random_tokens(folder: Path, count: int) -> Path:
    import numpy as np
    import pyarrow as pa
    import xxhash

    from gristmill.tokenize.pieces import index_bytes
    from gristmill.tokenize.shards import INDEX_SCHEMA, ShardInfo, TokenManifest

    target = folder / "tokens"
    target.mkdir()
    ids = np.random.default_rng(1).integers(0, VOCAB - 1, count).astype("<u2")
    ids[-1] = VOCAB - 1
    row = {"doc_id": ["d"], "source": ["all"], "start": [0], "length": [count], "bytes": [count]}
    index = index_bytes(pa.Table.from_pydict(row, schema=INDEX_SCHEMA))
    (target / "tokenizer.json").write_bytes(b"{}")
    (target / "part-00000.bin").write_bytes(ids.tobytes())
    (target / "part-00000.idx").write_bytes(index)
    info = ShardInfo(
        name="part-00000",
        source="all",
        split="train",
        documents=1,
        tokens=count,
        bytes=count,
        idx_bytes=len(index),
        bin_xxh3=xxhash.xxh3_128_hexdigest(ids.tobytes()),
        idx_xxh3=xxhash.xxh3_128_hexdigest(index),
    )
    digest = xxhash.xxh3_128_hexdigest(b"{}")
    manifest = TokenManifest(dtype="uint16", vocab_size=VOCAB, eos_id=VOCAB - 1, tokenizer_xxh3=digest, shards=[info])
    (target / "shards.json").write_bytes(manifest.sealed())
    return target


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    shape = PRESETS[options.shape].resolved(VOCAB)
    dtype = {"float32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    note(f"{options.shape}: {count_parameters(shape):,} parameters, {options.dtype}, {options.threads} threads.")
    batches = [torch.randint(0, VOCAB, (options.batch, options.seq_len + 1)) for _ in range(options.steps)]
    tokens = options.steps * options.batch * options.seq_len
    steps = {OURS: our_step(shape, dtype)}
    if plain := peer("torch", options.skip):
        steps[plain] = plain_step(shape, dtype)

    def turn(step: Callable[[Tensor], float]) -> None:
        for ids in batches:
            step(ids)

    for step in steps.values():
        step(batches[0])  # memory and kernels
    clock = time.perf_counter
    jobs = {who: speed(tokens, functools.partial(turn, step), clock) for who, step in steps.items()}
    found = rounds(jobs, options.rounds)
    yield from compared(f"train.{options.shape}", "tokens/s", found)
    flops = statistics.median(found[OURS]) * flops_per_token(shape, options.seq_len)
    limit = matrix_limit(shape, dtype, options.batch * options.seq_len)
    yield Figure("train.share_of_matrix_limit", flops / limit, "share")
    yield Figure("train.overhead", overhead(shape, options.dtype, options.batch, options.seq_len), "share")


def main() -> None:
    parser = arguments(__doc__, corpus=False)
    parser.add_argument("--shape", default="3m", choices=["1m", "3m", "10m", "124m"])
    parser.add_argument("--dtype", default="bf16", choices=["float32", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    options = parser.parse_args()
    show(figures(options), options.json)


if __name__ == "__main__":
    main()
