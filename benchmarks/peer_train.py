"""One training loop in a process of its own, for `train.py`: the same shapes and batch, random ids, turn by turn.

    python benchmarks/peer_train.py LOOP JSON      LOOP: gristmill, torch, transformers, litgpt or limit

The loop runs on and on; its data hold it back. After `steps` batches the next one waits for a line of standard input,
so a turn is that many whole steps of the loop as it is: forward, backward, clipping, update, and what it does besides.
Answers {"version": ...} when it is ready, with everything compiled, then {"seconds": ..., "memory_mb": ...} a turn.

Each loop is in its fastest mode, found by trying: bf16 and torch.compile for all (float32 where JSON says so).

    gristmill     the trainer's own loop with its loader, checks and log; without checkpoints
    torch         what one writes by hand in nanoGPT's manner: the same architecture in stock modules, fused QKV, full
                  logits, F.cross_entropy, clip_grad_norm_, torch.optim.AdamW(fused), autocast
    transformers  Trainer on LlamaForCausalLM, its log and progress bar off
    litgpt        `litgpt.pretrain`, its log off
    limit         no loop: every matrix product of one step, alone
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

answers = sys.stdout  # of the process; `main` sends elsewhere what the loops themselves say


def answer(**what: object) -> None:
    print(json.dumps(what), file=answers, flush=True)


class Turns:
    """Hands out batches; after a number of them, answers and waits for a line. The first turn is not measured."""

    def __init__(self, settings: SimpleNamespace, name: str):
        self.settings, self.name, self.given, self.began = settings, name, 0, 0.0

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if self.given and self.given % self.settings.steps == 0:
                self._turn()
            self.given += 1
            yield batch

    def _turn(self) -> None:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        if self.given == self.settings.steps:
            answer(version=self.name)
        else:
            answer(seconds=seconds, memory_mb=peak_mb(self.settings.device))
        if not sys.stdin.readline():
            sys.exit(0)
        self.began = time.perf_counter()


def peak_mb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def random_batches(settings: SimpleNamespace, ids: int) -> Iterator[Tensor]:
    """(batch, ids) int64, one of eight."""
    generator = torch.Generator().manual_seed(1)
    size = (8, settings.batch, ids)
    some = torch.randint(0, settings.vocab, size, generator=generator).to(settings.device)
    at = 0
    while True:
        yield some[at % len(some)]
        at += 1


# Ours


def random_tokens(folder: Path, vocab: int, count: int = 1 << 20) -> Path:
    """Token shards of one document of random ids."""
    import pyarrow as pa
    import xxhash

    from gristmill.tokenize.pieces import index_bytes
    from gristmill.tokenize.shards import INDEX_SCHEMA, ShardInfo, TokenManifest

    target = folder / "tokens"
    target.mkdir()
    ids = np.random.default_rng(1).integers(0, vocab - 1, count).astype("<u2")
    ids[-1] = vocab - 1
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
    manifest = TokenManifest(dtype="uint16", vocab_size=vocab, eos_id=vocab - 1, tokenizer_xxh3=digest, shards=[info])
    (target / "shards.json").write_bytes(manifest.sealed())
    return target


def our_job(settings: SimpleNamespace, folder: Path, **more: object) -> Any:
    """A prepared run of the trainer on random ids."""
    from gristmill.trainer import train
    from gristmill.trainer.config import ModelShape, Run, TrainConfig
    from gristmill.trainer.group import join

    (folder / "all.yaml").write_text("name: all\nmax_epochs: 1000000\nsources: {all: 1}\n")
    (folder / "out").mkdir()
    config = TrainConfig.model_validate(
        {
            "model": ModelShape.model_validate(settings.shape),
            "seq_len": settings.seq_len,
            "batch_windows": settings.batch,
            "dtype": settings.dtype,
            "compile": settings.compile,
            "device": settings.device,
            "threads": settings.threads,
            "lr": 1e-3,
            "eval_every": 0,
            "checkpoint_every": 0,
            "steps": 100_000,
            **more,
        }
    )
    tokens = random_tokens(folder, settings.vocab)
    run = Run(config=config, mixture=str(folder / "all.yaml"), tokens=str(tokens), out=str(folder / "out"))
    return train.prepare(run, join(config))


def ours(settings: SimpleNamespace) -> None:
    from gristmill.trainer import train

    with tempfile.TemporaryDirectory() as folder:
        job = our_job(settings, Path(folder))
        real, turns = job.feed.batches, Turns(settings, f"gristmill {version('gristmill')}")
        job.feed.batches = lambda *where: turns(real(*where))
        train.loop(job)


# A plain loop


class PlainBlock(nn.Module):
    def __init__(self, shape: SimpleNamespace):
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
        q, k = turned(q, cos, sin).to(v.dtype), turned(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, positions, width))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Plain(nn.Module):
    def __init__(self, shape: SimpleNamespace, seq_len: int):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.norm_eps)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=shape.init_std)
        head_width = shape.width // shape.heads
        inverse = shape.rope_base ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.arange(seq_len)[:, None] * inverse
        self.register_buffer("cos", torch.cat([angles, angles], dim=1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], dim=1).sin())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain(settings: SimpleNamespace) -> None:
    model: Any = Plain(SimpleNamespace(**settings.shape), settings.seq_len).to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if settings.compile:
        model = torch.compile(model)
    turns = Turns(settings, f"torch {version('torch')}")
    for ids in turns(random_batches(settings, settings.seq_len + 1)):
        with torch.autocast(settings.device, torch.bfloat16, enabled=settings.dtype == "bf16"):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# Others


def hugging_face(settings: SimpleNamespace) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    shape = SimpleNamespace(**settings.shape)
    turns = Turns(settings, f"transformers {version('transformers')}")

    class Loop(Trainer):
        def get_train_dataloader(self) -> Any:
            return turns({"input_ids": ids, "labels": ids} for ids in random_batches(settings, settings.seq_len))

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=settings.seq_len,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=100_000,
            per_device_train_batch_size=settings.batch,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            bf16=settings.dtype == "bf16",
            use_cpu=settings.device == "cpu",
            torch_compile=settings.compile,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Loop(LlamaForCausalLM(config), arguments).train()


def litgpt(settings: SimpleNamespace) -> None:
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import DataModule
    from litgpt.pretrain import setup
    from torch.utils.data import DataLoader, IterableDataset

    shape = SimpleNamespace(**settings.shape)

    class Ids(IterableDataset):  # type: ignore[type-arg]
        def __init__(self, turns: Callable[[Iterator[Tensor]], Iterator[Tensor]]):
            self.turns = turns

        def __iter__(self) -> Iterator[Tensor]:
            return self.turns(random_batches(settings, settings.seq_len + 1))

    class Data(DataModule):
        def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
            pass

        def train_dataloader(self) -> DataLoader[Tensor]:
            return DataLoader(Ids(Turns(settings, f"litgpt {version('litgpt')}")), batch_size=None)

        def val_dataloader(self) -> DataLoader[Tensor]:
            return DataLoader(Ids(lambda batches: batches), batch_size=None)

    with tempfile.TemporaryDirectory() as folder:
        setup(
            "own",
            Config(
                name="own",
                block_size=settings.seq_len,
                n_layer=shape.layers,
                n_head=shape.heads,
                n_embd=shape.width,
                vocab_size=shape.vocab_size,
                padded_vocab_size=shape.vocab_size,
                rotary_percentage=1.0,
                parallel_residual=False,
                bias=False,
                norm_class_name="RMSNorm",
                norm_eps=shape.norm_eps,
                mlp_class_name="LLaMAMLP",
                intermediate_size=shape.hidden,
            ),
            out_dir=Path(folder),
            precision="bf16-mixed" if settings.dtype == "bf16" else "32-true",
            data=Data(),
            train=TrainArgs(
                save_interval=None,
                log_interval=10**9,
                global_batch_size=settings.batch,
                micro_batch_size=settings.batch,
                max_tokens=10**12,
                max_norm=1.0,
                min_lr=1e-4,
                lr_warmup_steps=100,
                tie_embeddings=True,
            ),
            eval=EvalArgs(interval=10**9, max_iters=1, initial_validation=False),
            devices=1,
            logger_name="csv",
        )


def limit(settings: SimpleNamespace) -> None:
    """Every product of a step, forward and backward, on tensors of the loop's sizes; nothing else."""
    shape = SimpleNamespace(**settings.shape)
    dtype, rows = torch.bfloat16 if settings.dtype == "bf16" else torch.float32, settings.batch * settings.seq_len
    sizes = [(shape.width, shape.width)] * 4 + [(shape.width, shape.hidden)] * 2 + [(shape.hidden, shape.width)]
    sizes = sizes * shape.layers + [(shape.width, shape.vocab_size)]

    def some(*dims: int) -> Tensor:
        return torch.randn(*dims, device=settings.device).to(dtype)

    made = {(i, o): (some(rows, i), some(o, i), some(rows, o)) for i, o in set(sizes)}
    for _ in Turns(settings, "matrix products")(iter(int, 1)):
        for size in sizes:
            x, weight, grad = made[size]
            F.linear(x, weight)  # (rows, out)
            grad @ weight  # (rows, in)
            grad.T @ x  # (out, in)


LOOPS = {"gristmill": ours, "torch": plain, "transformers": hugging_face, "litgpt": litgpt, "limit": limit}


def main() -> None:
    sys.stdout = sys.stderr
    settings = SimpleNamespace(**json.loads(sys.argv[2]))
    torch.set_num_threads(settings.threads)
    torch.manual_seed(1)
    LOOPS[sys.argv[1]](settings)


if __name__ == "__main__":
    main()
