"""What comes after the documents in a small run: token shards, a finished ablation, a model's card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stages.documents import (
    Batch,
)
from gristmill.stages.ledger import ShardLedger, StageLedger, amount


def write_json(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(data))


def write_tokens(folder: Path, batches: list[Batch]) -> None:
    (folder / "tokens/ledger").mkdir(parents=True, exist_ok=True)
    shards = []
    for i, batch in enumerate(batches):
        held = pa.array([n % 10 == 0 for n in range(batch.num_rows)], pa.bool_())
        source = batch["source"][0].as_py() if batch.num_rows else ""
        train, holdout = amount(batch.filter(pc.invert(held))), amount(batch.filter(held))
        train.tokens, holdout.tokens = train.bytes // 4, holdout.bytes // 4
        sums = StageLedger(
            stage="tokenize", read=train + holdout, kept=train, dropped={"holdout": holdout}, seconds=0.2
        )
        ledger = ShardLedger(
            key=f"{i:032x}", segment="tokens", shard=i, source=source, input=f"part-{i:05d}", stages=[sums], seconds=0.2
        )
        ledger.check(f"tokens, shard {i}")
        (folder / "tokens/ledger" / f"part-{i:05d}.json").write_bytes(ledger.sealed())
        for split, part, rows in (
            ("train", train, batch.filter(pc.invert(held))),
            ("holdout", holdout, batch.filter(held)),
        ):
            name = f"{'part' if split == 'train' else 'holdout'}-{i:05d}"
            lengths = pc.add(pc.divide(pc.binary_length(rows["text"]), 4), 1).cast(pa.uint32())
            with pa.ipc.new_file(folder / "tokens" / f"{name}.idx", pa.schema([("length", pa.uint32())])) as writer:
                writer.write_batch(pa.RecordBatch.from_arrays([lengths], names=["length"]))
            shards.append(
                {
                    "name": name,
                    "source": source,
                    "split": split,
                    "documents": part.documents,
                    "tokens": part.tokens,
                    "bytes": part.bytes,
                    "bin_xxh3": "0" * 32,
                }
            )
    data = {"version": 1, "dtype": "uint16", "vocab_size": 4096, "tokenizer": "ab" * 16, "shards": shards}
    write_json(folder / "tokens/shards.json", data)


def write_ablation(folder: Path) -> None:
    """Three mixtures, three seeds; the keys of `trainer/ranking.py`."""
    rng = np.random.default_rng(3)
    weights = {"uniform": (1, 1, 1), "curriculum": (1, 2, 3), "docs_heavy": (8, 1, 1)}
    runs: list[dict[str, Any]] = []
    for mixture, base in (("uniform", 1.62), ("curriculum", 1.55), ("docs_heavy", 1.60)):
        for seed in (1, 2, 3):
            name = f"{mixture}-seed{seed}"
            steps = [_step(rng, step, base, weights[mixture]) for step in range(1, 201)]
            path = folder / "ablation" / name / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(orjson.dumps(s).decode() + "\n" for s in steps), encoding="utf-8")
            by_source = {
                s: base + d + float(rng.normal(0, 0.01)) for s, d in (("docs", 0), ("forum", 0.2), ("news", 0.1))
            }
            runs.append(
                {
                    "name": name,
                    "mixture": mixture,
                    "seed": seed,
                    "status": "done",
                    "score": float(np.mean(list(by_source.values()))),
                    "bits_per_byte": by_source,
                    "tokens": steps[-1]["sources"],
                    "seconds": 12.5,
                }
            )
    ranked = [_mixture_row(rank, name, runs) for rank, name in enumerate(("curriculum", "docs_heavy", "uniform"), 1)]
    data = {
        "name": "demo",
        "metric": "bits per byte on held-out documents, mean over sources; lower is better",
        "confidence": 0.95,
        "budget_tokens": 200 * 4096,
        "sources": ["docs", "forum", "news"],
        "mixtures": ranked,
        "pairs": [_pair("curriculum", "docs_heavy", -0.05, 0.003), _pair("docs_heavy", "uniform", -0.01, 0.2)],
        "runs": runs,
        "noise": 0.008,
        "noise_degrees": 4,
        "notes": [],
    }
    write_json(folder / "ablation/ranking.json", data)


def _step(rng: np.random.Generator, step: int, base: float, weights: tuple[int, ...]) -> dict[str, Any]:
    eaten = [4096 * step * w // sum(weights) for w in weights]
    if weights == (1, 2, 3):  # news only in the second half
        eaten = [4096 * step - 4096 * max(0, step - 100), 0, 4096 * max(0, step - 100)]
    return {
        "step": step,
        "tokens": step * 4096,
        "loss": None if step == 7 else float(base + 6 * np.exp(-step / 40) + rng.normal(0, 0.03)),
        "lr": 1e-3 * min(1, step / 20),
        "tokens_per_s": 20_000.0,
        "sources": dict(zip(("docs", "forum", "news"), eaten, strict=True)),
        **({"skipped": True} if step == 7 else {}),
    }


def _mixture_row(rank: int, mixture: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    own = [r for r in runs if r["mixture"] == mixture]

    def span(values: list[float]) -> dict[str, float]:
        mean, half = float(np.mean(values)), float(2 * np.std(values))
        return {"mean": mean, "low": mean - half, "high": mean + half}

    return {
        "rank": rank,
        "mixture": mixture,
        "seeds": [1, 2, 3],
        "score": span([r["score"] for r in own]),
        "documents": span([r["score"] for r in own]),
        "sources": {s: span([r["bits_per_byte"][s] for r in own]) for s in ("docs", "forum", "news")},
        "tokens": own[0]["tokens"],
        "tied_with_best": rank == 1,
    }


def _pair(first: str, second: str, difference: float, p: float) -> dict[str, Any]:
    span = {"mean": difference, "low": difference - 0.02, "high": difference + 0.02}
    verdict = f"{first} is better" if p < 0.05 else "not distinguishable"
    return {
        "first": first,
        "second": second,
        "difference": span,
        "documents": span,
        "p_seeds": p,
        "p_documents": p / 2,
        "p": p,
        "verdict": verdict,
    }


MODEL = {
    "name": "quality",
    "kind": "fasttext",
    "trained_on": {"positive": 120, "negative": 240},
    "precision": 0.91,
    "recall": 0.87,
}
