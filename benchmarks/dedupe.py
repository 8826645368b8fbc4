"""How fast duplicates are found: `python benchmarks/dedupe.py --corpus DIR [--json]`.

DIR holds *.jsonl.gz with {text, id, metadata}. Everything runs on one core, in CPU seconds of the thread; the peers
take turns with us, round after round, and the medians are printed with the ratio of each round to ours.

    dedupe.signatures        MB/s of UTF-8: ours, datatrove's signature step (simplify_text, spaCy words, shingles,
                             signature), datasketch (white-space words, xxh3). Same documents; 112 permutations.
    dedupe.exact_raw         MB/s of signing with by: text
    dedupe.exact_normalised  MB/s of signing with by: normalized
    dedupe.cluster_10m_s     wall seconds of MinHash.cluster on 10 million synthetic documents, 14 bands, a fifth of
                             them near copies; and the peak of anonymous memory in GB while it ran

To expect on one core of a server of 2024: signatures over 200 MB/s, hundreds of times datatrove; exact over 1,000 and
over 300 MB/s; clustering under 20 s and 2 GB.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from gristmill.stages.duplicates import with_settings
from gristmill.stages.exact import Exact
from gristmill.stages.minhash import MinHash, band_name

BATCH_BYTES = 16 << 20


def documents(folder: Path, limit_bytes: int) -> list[str]:
    """Texts from DIR in the order of names, up to limit_bytes of UTF-8."""
    texts: list[str] = []
    total = 0
    for path in sorted(folder.rglob("*.jsonl.gz")):
        with gzip.open(path, "rb") as lines:
            for line in lines:
                text = orjson.loads(line)["text"]
                total += len(text.encode())
                texts.append(text)
                if total >= limit_bytes:
                    return texts
    if not texts:
        raise SystemExit(f"{folder} holds no *.jsonl.gz. Name a folder with documents: {{text, id, metadata}}.")
    return texts


def batches(texts: list[str]) -> list[pa.RecordBatch]:
    """The documents as batches of about 16 MiB."""
    out, start, size = [], 0, 0
    for i, text in enumerate(texts, start=1):
        size += len(text.encode())
        if size >= BATCH_BYTES or i == len(texts):
            part = pa.array(texts[start:i], pa.string())
            ids = pa.array([f"{j:08d}" for j in range(start, i)])
            source, dump = pa.array(["corpus"] * (i - start)), pa.nulls(i - start, pa.string())
            out.append(pa.RecordBatch.from_pydict({"doc_id": ids, "source": source, "dump": dump, "text": part}))
            start, size = i, 0
    return out


def datatrove_signatures(texts: list[str]) -> Callable[[], object]:
    """datatrove's signature step without its files."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

    with tempfile.TemporaryDirectory() as folder:
        step = MinhashDedupSignature(folder, MinhashConfig())
    return lambda: [step.get_signature(step.get_shingles(t)) for t in texts if len(t.split()) >= 5]


def datasketch_signatures(texts: list[str]) -> Callable[[], object]:
    """datasketch on words between white space, with the fastest hash at hand."""
    import datasketch
    import xxhash

    def sign() -> None:
        for text in texts:
            words = text.lower().split()
            shingles = {" ".join(words[i : i + 5]).encode() for i in range(max(1, len(words) - 4))}
            datasketch.MinHash(num_perm=112, seed=1, hashfunc=xxhash.xxh32_intdigest).update_batch(shingles)

    return sign


def rounds(jobs: dict[str, tuple[float, Callable[[], object]]], repeats: int) -> dict[str, dict[str, float]]:
    """jobs: name -> (MB, work) -> name -> median MB/s and median ratio of the first job to it, round by round."""
    speeds: dict[str, list[float]] = {name: [] for name in jobs}
    for _, work in list(jobs.values())[:1]:
        work()  # compile
    for _ in range(repeats):
        for name, (megabytes, work) in jobs.items():
            before = time.thread_time()
            work()
            speeds[name].append(megabytes / (time.thread_time() - before))
    first = speeds[next(iter(jobs))]
    return {
        name: {
            "mb_per_s": round(statistics.median(values), 2),
            "times_slower": round(statistics.median(a / b for a, b in zip(first, values, strict=True)), 2),
        }
        for name, values in speeds.items()
    }


def megabytes_of(texts: list[str]) -> float:
    return sum(len(t.encode()) for t in texts) / 1e6


def synthetic(folder: Path, count: int, bands: int, shards: int = 10) -> None:
    """Writes signatures as a run holds them: `count` documents, a fifth near copies (J 0.9) of earlier ones."""
    rng = np.random.default_rng(0)
    per = count // shards
    originals = count - count // 5
    for shard in range(shards):
        rows = np.arange(shard * per, (shard + 1) * per, dtype=np.uint64)
        copy = rows >= originals
        of = np.where(copy, rows * np.uint64(7919) % np.uint64(originals), rows)
        columns: dict[str, pa.Array] = {
            "doc_id": pa.array([f"<urn:uuid:{i:032x}>" for i in rows.tolist()]),
            "source": pa.array(["crawl"]).take(pa.array(np.zeros(per, np.int64))),
            "dump": pa.nulls(per, pa.string()),
            "date": pa.nulls(per, pa.string()),
            "rank": pa.array(-rng.integers(200, 20_000, per).astype(np.float64)),
            "text_hash": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), per, [None, pa.py_buffer(rng.bytes(16 * per))]
            ),
            "shingles": pa.array(np.full(per, 500, np.uint32)),
            "capped": pa.array(np.zeros(per, np.uint8)),
        }
        for band in range(bands):
            shared = copy & (rng.random(per) < 0.9**8)
            key = (np.where(shared, of, rows) + np.uint64(band * 2**40)) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
            columns[band_name(band)] = pa.array(key * np.uint64(0xD6E8FEB86659FD93))
        batch = with_settings(columns, MinHash(bands=bands).described())
        with pa.ipc.new_file(folder / f"part-{shard:05d}.arrow", batch.schema) as writer:
            for start in range(0, per, 100_000):
                writer.write_batch(batch.slice(start, 100_000))


def cluster(folder: Path) -> dict[str, float]:
    """Clusters the signatures of a folder, read through memory maps, and watches memory."""
    stage = MinHash()
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            status = Path("/proc/self/status").read_text()
            peak[0] = max(peak[0], int(status.split("RssAnon:")[1].split()[0]) / 1e6)

    tables = [pa.ipc.open_file(pa.memory_map(str(p))).read_all() for p in sorted(folder.glob("*.arrow"))]
    stage.cluster([table.slice(0, 100) for table in tables])  # compile
    watcher = threading.Thread(target=watch)
    watcher.start()
    wall, cpu = time.perf_counter(), time.process_time()
    _, figures = stage.cluster(tables)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    done.set()
    watcher.join()
    return {
        "documents": figures["documents"],
        "removed": figures["removed"],
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "anonymous_gb": round(peak[0], 2),
    }


def clustering(count: int) -> dict[str, float]:
    """`cluster` in a process of its own, so that nothing else counts as its memory."""
    with tempfile.TemporaryDirectory() as folder:
        synthetic(Path(folder), count, MinHash().bands)
        command = [sys.executable, __file__, "--cluster-folder", folder]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="folder of *.jsonl.gz")
    parser.add_argument("--limit-mb", type=int, default=100, help="of text for our own figures")
    parser.add_argument("--peer-mb", type=float, default=2.0, help="of text for the slow peers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--documents", type=int, nargs="*", default=[10_000_000], help="to cluster")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cluster-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cluster_folder:
        print(json.dumps(cluster(options.cluster_folder)))
        return
    report: dict[str, Any] = {}
    if options.corpus:
        texts = documents(options.corpus, options.limit_mb << 20)
        few = documents(options.corpus, int(options.peer_mb * 2**20))
        ours, exact, normalised = MinHash(), Exact(by="text"), Exact(by="normalized")
        all_, some = batches(texts), batches(few)
        full, part = megabytes_of(texts), megabytes_of(few)
        report["dedupe.signatures"] = rounds(
            {
                "gristmill": (part, lambda: [ours.sign(b) for b in some]),
                "datasketch": (part, datasketch_signatures(few)),
                "datatrove": (part, datatrove_signatures(few)),
            },
            options.repeats,
        )
        whole = {
            "dedupe.signatures_all": lambda: [ours.sign(b) for b in all_],
            "dedupe.exact_raw": lambda: [exact.sign(b) for b in all_],
            "dedupe.exact_normalised": lambda: [normalised.sign(b) for b in all_],
        }
        for name, work in whole.items():
            report[name] = rounds({"gristmill": (full, work)}, options.repeats)["gristmill"]["mb_per_s"]
    for count in options.documents:
        report[f"dedupe.cluster_{count / 1e6:g}m"] = clustering(count)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
