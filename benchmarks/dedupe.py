"""How fast duplicates are found: `python benchmarks/dedupe.py --corpus DIR [--json]`.

DIR holds *.jsonl.gz with {text, id, metadata}. Signing runs on one core, the same for all, in CPU seconds; the peers
take turns with us, round after round.

    dedupe.signatures        MB/s on the documents of --peer-mb: ours, datatrove's signature step (simplify_text, spaCy
                             words, shingles, signature), datasketch (white-space words, xxh32), and with
                             --peer-python those of peer_dedupe.py (rensa, text-dedup, daft); 112 permutations
    dedupe.signatures_all    MB/s of ours on the documents of --mb
    dedupe.exact_raw         MB/s of signing them with by: text
    dedupe.exact_normalised  MB/s of signing them with by: normalized
    dedupe.end_to_end_*      MB/s and core of a whole run from Parquet to Parquet with the one stage `exact`, `exact` by
                             words, or `minhash`, on the documents of --end-mb: reading twice, ids, signatures,
                             clusters, writing, books; CPU seconds of all threads
    dedupe.cluster_10m_s     wall seconds of MinHash.cluster on 10 million synthetic documents, 14 bands, a fifth of
                             them near copies; other counts by --documents
    dedupe.cluster_10m_cpu_s CPU seconds of the same, which other work on the machine changes less
    dedupe.cluster_10m_gb    the peak of anonymous memory while it ran

To expect on one core of a server of 2024: signatures over 200 MB/s, 8 times rensa, hundreds of times datatrove; exact
over 1,000 and over 250 MB/s; end to end over 50 MB/s; clustering under 20 s and 2 GB.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
from common import (
    OURS,
    Figure,
    arguments,
    batches,
    compared,
    documents,
    in_own_process,
    in_peer_python,
    megabytes_of,
    note,
    on_one_core,
    peer,
    rounds,
    show,
    speed,
)
from dedupe_run import end_to_end
from peer_dedupe import PEERS

from gristmill.stages.exact import Exact
from gristmill.stages.minhash import MinHash, band_name
from gristmill.stages.signatures import with_settings


def datatrove_signatures(texts: list[str]) -> Callable[[], object]:
    """datatrove's signature step without its files."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

    with tempfile.TemporaryDirectory() as folder:
        step = MinhashDedupSignature(folder, MinhashConfig())
    step.get_shingles("It loads spaCy with the first document.")
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


def cluster(folder: Path) -> tuple[float, float, float, int]:
    """Clusters the signatures of a folder, read through memory maps: (wall seconds, CPU seconds, peak of anonymous
    memory in GB, documents removed). In a process of its own, so that nothing else counts as its memory."""
    stage = MinHash()
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        over = False
        while not over:  # once more when all is done
            over = done.wait(0.02)
            status = Path("/proc/self/status").read_text()
            peak[0] = max(peak[0], int(status.split("RssAnon:")[1].split()[0]) / 1e6)

    tables = [pa.ipc.open_file(pa.memory_map(str(p))).read_all() for p in sorted(folder.glob("*.arrow"))]
    stage.cluster([table.slice(0, 100) for table in tables])  # compile
    watcher = threading.Thread(target=watch)
    watcher.start()
    start, cpu_start = time.perf_counter(), time.process_time()
    _, counts = stage.cluster(tables)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    done.set()
    watcher.join()
    return wall_s, cpu_s, peak[0], int(counts["removed"])


def clustering(count: int) -> Iterator[Figure]:
    name = f"dedupe.cluster_{count // 10**6}m" if count % 10**6 == 0 else f"dedupe.cluster_{count}"
    with tempfile.TemporaryDirectory() as folder:
        synthetic(Path(folder), count, MinHash().bands)
        wall_s, cpu_s, anonymous_gb, removed = in_own_process(cluster, Path(folder))
    note(f"{name}: {removed:,} of {count:,} documents removed.")
    yield Figure(f"{name}_s", wall_s, "s")
    yield Figure(f"{name}_cpu_s", cpu_s, "s")
    yield Figure(f"{name}_gb", anonymous_gb, "GB")


def signing(options: argparse.Namespace) -> Iterator[Figure]:
    texts = documents(options.corpus, options.mb * 1e6)
    few = documents(options.corpus, options.peer_mb * 1e6)
    ours, exact, normalised = MinHash(), Exact(by="text"), Exact(by="normalized")
    all_, some = batches(texts), batches(few)
    full, part = megabytes_of(texts), megabytes_of(few)
    for stage in (ours, exact, normalised):
        stage.sign(some[0])  # compile
    jobs = {OURS: speed(part, lambda: [ours.sign(b) for b in some])}
    if datasketch := peer("datasketch", options.skip):
        jobs[datasketch] = speed(part, datasketch_signatures(few))
    if datatrove := peer("datatrove", options.skip, needs=["spacy"]):
        jobs[datatrove] = speed(part, datatrove_signatures(few))
    with ExitStack() as stack:
        jobs |= {name: work for name, work in peers_elsewhere(options, few, stack, part)}
        yield from compared("dedupe.signatures", "MB/s", rounds(jobs, options.rounds))
    whole = {
        "dedupe.signatures_all": lambda: [ours.sign(b) for b in all_],
        "dedupe.exact_raw": lambda: [exact.sign(b) for b in all_],
        "dedupe.exact_normalised": lambda: [normalised.sign(b) for b in all_],
    }
    for name, work in whole.items():
        yield from compared(name, "MB/s", rounds({OURS: speed(full, work)}, options.rounds))


def peers_elsewhere(
    options: argparse.Namespace, texts: list[str], stack: ExitStack, megabytes: float
) -> Iterator[tuple[str, Callable[[], float]]]:
    """The peers that the interpreters of --peer-python have: their name and version, and a round's MB/s."""
    if not options.peer_python:
        note(f"{', '.join(PEERS)} are skipped: --peer-python names no interpreter that has them.")
    for python in options.peer_python:
        for name in PEERS:
            if name in options.skip:
                note(f"{name} is skipped, as --skip asks.")
                continue
            found, sign = stack.enter_context(in_peer_python("--peer-python", python, "peer_dedupe.py", texts, name))
            if found is None:
                note(f"{name} is skipped: {python} does not have it.")
                continue
            yield f"{name} {found}", lambda sign=sign: megabytes / sign()  # type: ignore[misc]


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    with on_one_core():
        yield from signing(options)
    if options.end_mb:
        with tempfile.TemporaryDirectory() as folder:
            yield from end_to_end(options.corpus, Path(folder), options.end_mb * 1e6, options.end_rounds)
    for count in options.documents:
        yield from clustering(count)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mb", type=float, default=100, help="of text for our own figures")
    parser.add_argument("--peer-mb", type=float, default=2, help="of text for the slow peers")
    parser.add_argument("--end-mb", type=float, default=300, help="of text for whole runs; 0 leaves them out")
    parser.add_argument("--end-rounds", type=int, default=3, help="of whole runs")
    parser.add_argument(
        "--peer-python", type=Path, nargs="*", default=[], metavar="PATH", help="interpreters that have other peers"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, nargs="*", default=[10_000_000], help="to cluster, by the thousand")
    options = parser.parse_args()
    show(figures(options), options.json)


if __name__ == "__main__":
    main()
