"""How much near-duplicate removal finds, and how much of it is right: `gristmill dedupe-audit RUN`.

Recall: copies of real documents of the run, edited to a known Jaccard similarity, are signed and clustered together
with the run's own documents, by the settings of its recipe. A copy is found when it falls into the cluster of the
document that it was made from. Beside it stands what theory promises, 1 - (1 - s^rows)^bands, averaged over the
similarities that the copies really have.

Precision: for pairs that the run removed, the true Jaccard similarity of their shingles between the document that went
and the one that stayed in its place.

Nothing of the run is changed but one file, `<segment>/audit.json`, which the report shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from scipy.stats import binom

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.open_run import Run, RunError
from gristmill.pipelines.upstream import Upstream, upstream_of
from gristmill.stages.documents import BASE_FIELDS, Batch
from gristmill.stages.minhash import MinHash, recall
from gristmill.stages.shards import Shard, join, publish_bytes
from gristmill.stages.stores import local_copy

LEVELS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))  # Jaccard similarities that copies are made for
MIN_SHINGLES = 60  # of a document to copy; fewer cannot be edited to a similarity
ONCE_IN_740 = 0.00135  # the lower tail of a normal distribution beyond three standard deviations
PREFIX = "audit:"  # of the copies' doc_id
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Recall:
    """Copies of one level."""

    level: float
    copies: int
    similarity: float  # mean, of the copies as they are
    found: float  # share
    promised: float  # share, by the settings' bands and rows
    deviation: float  # of `promised` for so many copies

    @property
    def within(self) -> bool:
        """Chance alone finds so few less often than once in 740 times: three standard deviations, of few copies too."""
        return bool(binom.cdf(round(self.found * self.copies), self.copies, self.promised) >= ONCE_IN_740)


@dataclass(frozen=True)
class Audit:
    """What was measured."""

    stage: str
    bands: int
    rows: int
    verify: str
    min_similarity: float | None  # of an edge, where edges are verified
    recall: list[Recall]
    removed: int  # by the stage in the run
    compared: int  # removed documents whose pair was compared
    not_compared: int  # chosen, but more than one document has the name of the one that stayed
    similarities: list[float] = field(default_factory=list)  # of the pairs, ascending
    lowest: list[tuple[float, str, str]] = field(default_factory=list)  # similarity, document that went, that stayed

    def at_least(self, similarity: float) -> float:
        """Share of the compared pairs that are at least so similar."""
        return float(np.mean(np.asarray(self.similarities) >= similarity)) if self.similarities else float("nan")


def audit(run: Run, documents: int = 1_000, pairs: int = 500, seed: int = 0) -> Audit:
    """Measures the run's first `minhash`. documents: copies to plant; pairs: removed documents to compare.

    Raises RunError when the run has no such stage, or no document that is long enough.
    """
    segment, upstream, use = _stage_of(run)
    stage: MinHash = use.stage
    shards = [Shard.model_validate(entry) for entry in run.inputs]
    signed = [shard for shard in shards if use.applies(shard.source)]
    chosen = _originals(run, upstream, signed, stage, documents, seed)
    planted, true = _copies(stage, chosen, seed)
    tables = [*(_signatures(run, segment, upstream, stage, shard) for shard in signed), _signed(stage, planted)]
    decisions, _ = stage.cluster(tables)
    found = _found(chosen, decisions, [shard.part for shard in signed])
    expected = np.array([_promise(stage, similarity) for similarity in true])
    similarities, lowest, compared, unknown, removed = _pairs(run, segment, upstream, signed, stage, pairs, seed)
    out = Audit(
        use.key,
        *stage.shape,
        stage.verify,
        None if stage.verify == "none" else stage.min_similarity,
        list(_levels(true, found, expected)),
        removed,
        compared,
        unknown,
        similarities,
        lowest,
    )
    publish_bytes(join(run.path, segment, "audit.json"), as_json(out).encode())
    return out


def _stage_of(run: Run) -> tuple[str, Upstream, recipes.StageUse]:
    """(segment, the documents before it, the use of minhash)"""
    loaded = recipes.load(local_copy(join(run.path, "recipe.yaml")))
    for segment in recipes.segments(loaded):
        if segment.gate is not None and isinstance(segment.gate.stage, MinHash):
            if segment.folder not in run.segments:
                raise RunError(f"{run.path} has not come to {segment.folder} yet. Run the recipe again, then audit.")
            return segment.folder, upstream_of(loaded, run.path, segment.folder), segment.gate
    raise RunError(f"The recipe of {run.path} has no stage minhash: there is nothing to audit.")


# Recall


@dataclass(frozen=True)
class _Original:
    """A document to copy."""

    row: dict[str, Any]
    part: str


def _originals(
    run: Run, upstream: Upstream, shards: Sequence[Shard], stage: MinHash, count: int, seed: int
) -> list[_Original]:
    """Documents with enough shingles, by the lowest hash of their id; the same ones every time."""
    exact = stage.model_copy(update={"verify": "jaccard"})
    candidates = [found for shard in shards for found in _lowest(upstream, shard, 2 * count, seed)]
    candidates.sort(key=lambda c: (_order(c.row, seed), c.part))
    out: list[_Original] = []
    for original in candidates:
        if len(out) == count:
            break
        if len(_shingle_sets(exact, _batch([original.row]))[0]) >= MIN_SHINGLES:
            out.append(original)
    if not out:
        raise RunError(
            f"No document that {stage.name} compared in {run.path} has {MIN_SHINGLES} shingles, so none can be edited "
            "to a similarity."
        )
    return out


def _lowest(upstream: Upstream, shard: Shard, count: int, seed: int) -> list[_Original]:
    """The documents of a shard with the lowest hashes of their ids."""
    best: list[tuple[int, str, dict[str, Any]]] = []
    for batch in upstream.batches(shard):
        names = batch.select(["source", "doc_id"]).to_pylist()
        orders = [_order(row, seed) for row in names]
        limit = best[-1][0] if len(best) == count else 1 << 64
        near = [i for i in np.argsort(np.array(orders, np.uint64))[:count].tolist() if orders[i] < limit]
        rows = batch.take(pa.array(near, pa.int64())).to_pylist()
        best += [(orders[i], row["doc_id"], row) for i, row in zip(near, rows, strict=True)]
        best = sorted(best, key=lambda one: one[:2])[:count]
    return [_Original(row, shard.part) for _, _, row in best]


def _order(row: dict[str, Any], seed: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{row['source']}\0{row['doc_id']}", seed=seed)


def _copies(stage: MinHash, chosen: Sequence[_Original], seed: int) -> tuple[Batch, list[float]]:
    """The edited copies, one for each document in turn over the levels, and how similar they really are."""
    exact = stage.model_copy(update={"verify": "jaccard"})
    rows = []
    for i, original in enumerate(chosen):
        text = edited(original.row["text"], LEVELS[i % len(LEVELS)], stage.ngram, np.random.default_rng([seed, i]))
        rows.append({**original.row, "text": text, "doc_id": f"{PREFIX}{i:08d}:{original.row['doc_id']}"})
    planted = _batch(rows)
    before = _shingle_sets(exact, _batch([original.row for original in chosen]))
    after = _shingle_sets(exact, planted)
    return planted, [_jaccard(a, b) for a, b in zip(before, after, strict=True)]


def edited(text: str, similarity: float, ngram: int, rng: np.random.Generator) -> str:
    """The text with one run of words replaced by new ones, so that about `similarity` of the shingles of both are
    shared: a run of m words changes k = m + ngram - 1 of N shingles, and (N - k) / (N + k) remain."""
    spans = [match.span() for match in _WORD.finditer(text)]
    if len(spans) < MIN_SHINGLES // 2:  # a script without spaces: characters are its words
        spans = [(i, i + 1) for i, c in enumerate(text) if not c.isspace()]
    shingles = max(1, len(spans) - ngram + 1)
    changed = shingles * (1 - similarity) / (1 + similarity)
    words = min(len(spans), max(1, round(changed) - ngram + 1))
    first = int(rng.integers(len(spans) - words + 1))
    letters = np.array(list("bcdfghjklmnpqrstvwxz"))
    new = ["".join(rng.choice(letters, 12)) for _ in range(words)]
    return f"{text[: spans[first][0]]}{' '.join(new)} {text[spans[first + words - 1][1] :]}"


def _promise(stage: MinHash, similarity: float) -> float:
    """The share of such pairs that the bands find; none below the similarity that edges must have."""
    if stage.verify == "jaccard" and similarity < stage.min_similarity:
        return 0.0
    return recall(similarity, *stage.shape)


def _found(chosen: Sequence[_Original], decisions: Sequence[pa.Table], parts: Sequence[str]) -> np.ndarray:
    """(n,) bool: the copy and its original are in one cluster."""
    clusters = {part: _clusters(table) for part, table in zip(parts, decisions, strict=False)}
    copies = {doc_id.split(":", 2)[1]: cluster for doc_id, cluster in _clusters(decisions[-1]).items()}
    out = np.zeros(len(chosen), bool)
    for i, original in enumerate(chosen):
        of_copy = copies.get(f"{i:08d}")
        out[i] = of_copy is not None and of_copy == clusters[original.part].get(original.row["doc_id"])
    return out


def _clusters(decisions: pa.Table) -> dict[str, str]:
    pairs = zip(decisions["doc_id"].to_pylist(), decisions["minhash.cluster"].to_pylist(), strict=True)
    return {doc_id: cluster for doc_id, cluster in pairs if cluster is not None}  # null: only an earlier run has it


def _levels(true: Sequence[float], found: np.ndarray, promised: np.ndarray) -> Iterator[Recall]:
    similarity = np.asarray(true)
    for i, level in enumerate(LEVELS):
        of = np.arange(len(similarity)) % len(LEVELS) == i
        if count := int(of.sum()):
            deviation = float(np.sqrt((promised[of] * (1 - promised[of])).sum())) / count
            mean, share, promise = (float(v[of].mean()) for v in (similarity, found, promised))
            yield Recall(level, count, mean, share, promise, deviation)


# Signatures


def _signatures(run: Run, segment: str, upstream: Upstream, stage: MinHash, shard: Shard) -> pa.Table:
    """Those of the run where it kept them, else made again."""
    name = f"{segment}/sign/{shard.part}.arrow"
    if shard.part + ".arrow" in run.files(f"{segment}/sign", ".arrow"):
        return run.arrow_table(name)
    signed = [stage.sign(batch) for batch in upstream.batches(shard, _columns(stage))]
    return pa.Table.from_batches(signed) if signed else _signed(stage, _batch([]))


def _columns(stage: MinHash) -> list[str]:
    return ["doc_id", *(name for name in stage.needs if name != "doc_id")]


def _signed(stage: MinHash, batch: Batch) -> pa.Table:
    return pa.Table.from_batches([stage.sign(batch)])


def _batch(rows: Sequence[dict[str, Any]]) -> Batch:
    """Documents as a batch, with every column that a keep policy may ask for."""
    names = dict.fromkeys([*BASE_FIELDS, "text", *(name for row in rows for name in row)])
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        numeric = any(isinstance(value, float) for value in values)
        kind = pa.float64() if numeric else pa.string()
        if numeric or all(value is None or isinstance(value, str) for value in values):
            columns[name] = pa.array(values, kind)
    return pa.RecordBatch.from_pydict(columns)


def _shingle_sets(stage: MinHash, batch: Batch) -> list[np.ndarray]:
    """The distinct shingles of each document, as the stage hashes them; stage has `verify: jaccard`."""
    return [np.asarray(shingles.values) for shingles in stage.sign(batch)["shingle_set"]]


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    either = len(np.union1d(a, b))
    return (len(a) + len(b) - either) / either if either else 0.0


# Precision


def _pairs(
    run: Run, segment: str, upstream: Upstream, shards: Sequence[Shard], stage: MinHash, count: int, seed: int
) -> tuple[list[float], list[tuple[float, str, str]], int, int, int]:
    """-> similarities ascending, the lowest with their names, pairs compared, chosen but not compared, removed."""
    removed = [
        {**row, "part": part}
        for part in run.parts("dropped", segment)
        for row in _removed_rows(run, part)
        if row["minhash.cluster"] is not None
    ]
    chosen = sorted(removed, key=lambda row: (_order(row, seed), row["part"]))[:count]
    wanted = pa.array(sorted({row[name] for row in chosen for name in ("doc_id", "minhash.cluster")}), pa.string())
    texts: dict[tuple[str, str], str] = {}
    where: dict[str, list[str]] = {}
    for shard in shards if chosen else ():
        part = f"{shard.part}.parquet"
        for rows in upstream.rows(shard, wanted, ("doc_id", "text")):
            for doc_id, text in zip(rows["doc_id"].to_pylist(), rows["text"].to_pylist(), strict=True):
                texts[part, doc_id] = text
                where.setdefault(doc_id, []).append(part)
    exact = stage.model_copy(update={"verify": "jaccard"})
    found, unknown = [], 0
    for row in chosen:
        gone = texts.get((row["part"].rsplit("/", 1)[-1], row["doc_id"]))
        stays = where.get(row["minhash.cluster"], [])
        if gone is None or len(stays) != 1:  # of an earlier run, or a name that two documents have
            unknown += 1
            continue
        pair = [{"doc_id": str(i), "text": t} for i, t in enumerate((gone, texts[stays[0], row["minhash.cluster"]]))]
        similarity = _jaccard(*_shingle_sets(exact, _batch(pair)))
        found.append((similarity, row["doc_id"], row["minhash.cluster"]))
    found.sort()
    return [similarity for similarity, _, _ in found], found[:10], len(found), unknown, len(removed)


def _removed_rows(run: Run, part: str) -> list[dict[str, Any]]:
    with run.open_parquet(part) as file:
        if "minhash.cluster" not in file.schema_arrow.names:
            return []
        table = file.read(columns=["doc_id", "source", "stage", "minhash.cluster"])
    rows: list[dict[str, Any]] = table.filter(pc.equal(table["stage"], "minhash")).to_pylist()
    return rows


# Output


def as_json(found: Audit) -> str:
    body = asdict(found)
    body["recall"] = [{**asdict(row), "within": row.within} for row in found.recall]
    body["similarities"] = [round(value, 4) for value in found.similarities]
    body["at_least"] = {f"{s:.2f}": found.at_least(s) for s in LEVELS} if found.similarities else {}
    return orjson.dumps(body, option=orjson.OPT_INDENT_2).decode()


def tables(found: Audit) -> list[tuple[str, Sequence[str], list[dict[str, Any]]]]:
    """(title, columns, rows) for a terminal."""
    verified = "" if found.min_similarity is None else f", edges of {found.min_similarity:g} by {found.verify}"
    title = f"Recall of {found.stage} ({found.bands} bands of {found.rows}{verified}), on edited copies"
    columns = ("edited to", "copies", "Jaccard", "found", "promised", "3 deviations", "as promised")
    rows = [
        {
            "edited to": f"{row.level:.2f}",
            "copies": row.copies,
            "Jaccard": row.similarity,
            "found": row.found,
            "promised": row.promised,
            "3 deviations": 3 * row.deviation,
            "as promised": row.within,
        }
        for row in found.recall
    ]
    out: list[tuple[str, Sequence[str], list[dict[str, Any]]]] = [(title, columns, rows)]
    if found.similarities:
        shares = [{"Jaccard at least": f"{s:.2f}", "pairs": found.at_least(s)} for s in LEVELS]
        title = f"Precision: {found.compared:,} of {found.removed:,} removed documents beside the one that stayed"
        out.append((title, ("Jaccard at least", "pairs"), shares))
    return out
