"""Token shards: sums by source and split, lengths of documents, shards with their checksums."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from gristmill.pipelines.inspect import spread
from gristmill.pipelines.open_run import TOKENS, Run, share

LENGTH_SHARDS = 64  # whose documents' lengths are read
SHOWN_SHARDS = 200


def tokens(run: Run) -> dict[str, Any]:
    """Sums by source and split, and the shards with their checksums."""
    manifest = run.token_shards
    if not manifest:
        return {}
    shards = [s for s in manifest.get("shards") or [] if isinstance(s, dict)]
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for shard in shards:
        key = str(shard.get("source", "")), str(shard.get("split", ""))
        entry = sums.setdefault(
            key, {"source": key[0], "split": key[1], "shards": 0, "documents": 0, "tokens": 0, "bytes": 0}
        )
        entry["shards"] += 1
        for name in ("documents", "tokens", "bytes"):
            entry[name] += int(shard.get(name) or 0)
    for entry in sums.values():
        entry["bytes_per_token"] = share(entry["bytes"], entry["tokens"])
    return {
        "facts": {
            k: v for k, v in manifest.items() if k not in ("shards", "digest") and not isinstance(v, dict | list)
        },
        "special_ids": manifest.get("special_ids") or {},
        "sources": sorted(sums.values(), key=lambda e: (e["split"] != "train", -e["tokens"])),
        "total": sum(e["tokens"] for e in sums.values() if e["split"] == "train"),
        "lengths": lengths(run, [str(s["name"]) for s in shards if s.get("split") == "train" and s.get("name")]),
        "shards": [{k: v for k, v in s.items() if not isinstance(v, dict | list)} for s in shards[:SHOWN_SHARDS]],
        "more_shards": max(0, len(shards) - SHOWN_SHARDS),
    }


def lengths(run: Run, names: list[str]) -> dict[str, Any]:
    """Documents by their number of tokens, in ranges that double, from the indexes of shards spread over the set.

    A column is named by the largest length in it.
    """
    there = set(run.files(TOKENS, ".idx"))
    names = [name for name in names if f"{name}.idx" in there]
    chosen = [names[i] for i in spread(len(names), LENGTH_SHARDS)]
    counts: Counter[int] = Counter()
    for name in chosen:
        counted = run.arrow_column(f"{TOKENS}/{name}.idx", "length").to_numpy().astype(np.int64)
        powers, found = np.unique(np.ceil(np.log2(np.maximum(counted, 1))).astype(int), return_counts=True)
        counts.update(dict(zip(powers.tolist(), found.tolist(), strict=True)))
    ranges = range(min(counts), max(counts) + 1) if counts else []
    return {
        "columns": [(f"{1 << power:,}", counts[power]) for power in ranges],
        "shards": len(chosen),
        "of": len(names),
    }
