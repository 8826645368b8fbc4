"""MinHash: estimates, recall, clusters, the contract of a global stage."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasketch.lsh import _optimal_param
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.stages.documents import apply_decisions
from gristmill.stages.exact import Exact
from gristmill.stages.kernels import cluster, hashing, shingles
from gristmill.stages.kernels import minhash as kernel
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.minhash import MinHash, choose_bands
from gristmill.stages.signatures import ClusterError

MASK = 2**64 - 1


def batch(texts: Sequence[str], **columns: list[Any]) -> pa.RecordBatch:
    n = len(texts)
    base: dict[str, Any] = {
        "doc_id": pa.array([f"d{i:04d}" for i in range(n)], pa.string()),
        "source": pa.array(["web"] * n, pa.string()),
        "dump": pa.nulls(n, pa.string()),
        "date": pa.nulls(n, pa.string()),
        "text": pa.array(texts, pa.string()),
    }
    return pa.RecordBatch.from_pydict(base | columns)


def words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(count)]


def removed(stage: Any, batches: Sequence[pa.RecordBatch]) -> set[str]:
    """Ids of the documents that the stage removes when each batch is a shard; checks the counts on the way."""
    decisions, figures = stage.cluster([pa.Table.from_batches([stage.sign(b)]) for b in batches])
    out: set[str] = set()
    for one, table in zip(batches, decisions, strict=True):
        result, met = apply_decisions(stage, one, table)
        assert met == table.num_rows
        out |= set(result.dropped["doc_id"].to_pylist())
    assert figures["removed"] == len(out)
    return out


# Kernel


def slow_signature(values: list[int], factors: list[int], summands: list[int]) -> list[int]:
    return [min((a * x + b) % 2**32 for x in values) for a, b in zip(factors, summands, strict=True)]


def mix(h: int) -> int:
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & MASK
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return h ^ h >> 33


@settings(max_examples=40, deadline=None)
@given(st.text(st.sampled_from("ab cd 中文 é1"), min_size=1, max_size=80), st.integers(1, 6), st.integers(1, 3))
def test_keys_equal_slow_python(text: str, ngram: int, rows: int) -> None:
    stage = MinHash(ngram=ngram, bands=3, rows=rows, verify="signature", seed=5)
    signed = stage.sign(batch([text, "", text]))
    assert signed["band_00"][0] == signed["band_00"][2]
    assert signed["shingles"][1].as_py() == 0
    values = shingles.shingle_set(text, ngram).tolist()
    if not values:
        assert signed["shingles"][0].as_py() == 0
        return
    k = 3 * rows
    factors, summands = (p.tolist()[:k] for p in kernel.permutations(k, 5))
    signature = slow_signature(values, factors, summands)
    assert signed["signature"][0].as_py() == signature
    if len(values) == 1:
        return  # the keys of one shingle come from its 64 bits, see below
    for band in range(3):
        h = 0x9E3779B97F4A7C15 * (band + 1) & MASK
        for place in signature[band * rows : (band + 1) * rows]:
            h = mix(h ^ place)
        assert signed[f"band_{band:02d}"][0].as_py() == h


def test_permutations_are_fixed() -> None:
    """What a seed means is part of the format of stored signatures."""
    factors, summands = kernel.permutations(6, 1)
    assert len(factors) == 8
    assert all(a % 2 for a in factors.tolist())
    assert factors[:2].tolist() == [755968199, 2255797187]
    assert summands[:2].tolist() == [1971679092, 1545423271]
    assert kernel.permutations(6, 2)[0].tolist() != factors.tolist()


@pytest.mark.parametrize(("threshold", "permutations"), [(0.5, 32), (0.75, 64), (0.8, 112), (0.9, 48)])
def test_choice_of_bands_is_datasketchs(threshold: float, permutations: int) -> None:
    assert choose_bands(threshold, permutations) == _optimal_param(threshold, permutations, 0.5, 0.5)


def test_guard_bytes_around_the_column() -> None:
    """Documents in the middle of a buffer, with letters before and after: a slice of a column."""
    texts = ["abc def " * 9, "", "中文", "x", "abc def " * 9]
    whole = MinHash(verify="jaccard").sign(batch(["zzz zzz", *texts, "yyy yyy"]).slice(1, 5))
    alone = MinHash(verify="jaccard").sign(batch(texts))
    for name in alone.schema.names:
        if name != "doc_id":
            assert whole[name].to_pylist() == alone[name].to_pylist(), name
    offsets, _ = string_views(batch(["zz", *texts]).slice(1)["text"])
    assert offsets[0] == 2


# Stage


def test_worked_example() -> None:
    """d0, d1 and d2 differ in case and one word at the end; the longest stays. The others have nothing in common."""
    text = "the quick brown fox jumps over the lazy dog and runs away from here " * 3
    stage = MinHash()
    table = pa.Table.from_batches([stage.sign(batch([text, text + "quickly now", text.upper(), "other", "", "..."]))])
    decisions, figures = stage.cluster([table])
    assert decisions[0].to_pylist() == [
        {"doc_id": "d0000", "reason": "near_duplicate", "minhash.cluster": "d0001", "minhash.cluster_size": 3.0},
        {"doc_id": "d0001", "reason": None, "minhash.cluster": "d0001", "minhash.cluster_size": 3.0},
        {"doc_id": "d0002", "reason": "near_duplicate", "minhash.cluster": "d0001", "minhash.cluster_size": 3.0},
    ]
    assert figures["documents"] == 6
    assert (figures["clusters"], figures["removed"], figures["sizes"]) == (1, 2, {"3": 1})
    assert figures["biggest"] == [{"cluster": "d0001", "size": 3, "doc_ids": ["d0001", "d0000", "d0002"]}]
    assert figures["without_words"] == 2
    assert figures["recall"]["0.80"] == pytest.approx(0.9235, abs=1e-4)


def test_short_documents_are_compared_as_a_whole() -> None:
    texts = ["Terms of use", "terms of use!", "terms of sale", "use", "use", "", "", "?!", "中", "中。", "🤷", "🤷 "]
    assert removed(MinHash(keep="first"), [batch(texts)]) == {"d0001", "d0004", "d0009", "d0011"}


@pytest.mark.parametrize("verify", ["none", "jaccard"])
def test_a_normalisation_of_ones_own(verify: str) -> None:
    """Three texts that differ in numbers alone are copies, unless numbers count."""
    texts = [f"call {i} for the price of {i + 1} or {i + 2} apples at {i + 3} o'clock" for i in (1, 5, 9)]
    assert removed(MinHash(verify=verify, keep="first"), [batch(texts)]) == {"d0001", "d0002"}
    assert removed(MinHash(verify=verify, normalize={"numbers": False}), [batch(texts)]) == set()


def test_sentences_without_spaces_are_not_one_word() -> None:
    """Chinese, Japanese, Thai: copies with another end are found, other sentences of the same words are not."""
    for letters in ("天地玄黃宇宙洪荒日月盈昃辰宿列張", "あいうえおかきくけこさしすせそ", "กขคฆงจฉชซฌญฎฏฐฑฒณดตถ"):
        rng = random.Random(letters)
        text, other = ("".join(rng.choices(letters, k=300)) for _ in range(2))
        assert removed(MinHash(verify="jaccard", keep="first"), [batch([text, text + letters[:8], other])]) == {"d0001"}


def test_two_short_documents_never_merge_by_32_bits() -> None:
    """One-shingle documents: the 32-bit hash may be shared by chance, so the keys must come from all 64 bits."""
    keys = np.empty((2, 2), np.uint64)
    places = np.array([1, 2, 3, 4], np.uint32)
    kernel.band_keys(places, np.uint64(7), 2, 2, 0, keys)
    kernel.band_keys(places, np.uint64(7 + 2**40), 2, 2, 1, keys)
    assert len(set(keys.reshape(-1).tolist())) == 4


def corpus(count: int = 400) -> tuple[list[str], set[frozenset[int]]]:
    """Random documents, each fourth with three near copies -> texts, groups of indices that belong together."""
    rng = random.Random(11)
    texts: list[str] = []
    groups = set()
    while len(texts) < count:
        original = words(rng, rng.randrange(60, 300))
        first = len(texts)
        texts.append(" ".join(original))
        if rng.random() < 0.25:
            for _ in range(3):
                copy = list(original)
                copy[rng.randrange(len(copy))] = "changed"
                texts.append(" ".join(copy).upper())
            groups.add(frozenset(range(first, len(texts))))
    return texts, groups


@pytest.mark.parametrize("verify", ["none", "signature", "jaccard"])
def test_planted_copies_are_removed_and_nothing_else(verify: str) -> None:
    texts, groups = corpus()
    gone = removed(MinHash(verify=verify, keep="first"), [batch(texts)])
    assert gone == {f"d{i:04d}" for group in groups for i in sorted(group)[1:]}


@pytest.mark.parametrize("keep", ["longest", "first", "earliest", "best(quality.score)", "best(-quality.score)"])
@pytest.mark.parametrize("verify", ["none", "jaccard"])
def test_result_depends_neither_on_shards_nor_on_order(keep: str, verify: str) -> None:
    texts, _ = corpus(200)
    rng = random.Random(5)
    scores = [float(rng.randrange(3)) if rng.random() < 0.8 else None for _ in texts]
    dates = [rng.choice([None, "2023-01-01", "2024-05-01T00:00:00Z"]) for _ in texts]
    whole = batch(texts, date=pa.array(dates, pa.string()), **{"quality.score": pa.array(scores, pa.float64())})
    stage = MinHash(keep=keep, verify=verify)
    expected = removed(stage, [whole])
    assert expected
    for seed in range(3):
        order = list(range(len(texts)))
        random.Random(seed).shuffle(order)
        mixed = whole.take(pa.array(order))
        cuts = sorted(random.Random(seed).sample(range(len(texts)), 5))
        shards = [mixed.slice(a, b - a) for a, b in zip([0, 0, *cuts], [0, *cuts, len(texts)], strict=True)]
        assert removed(stage, shards) == expected
    small = stage.model_copy(update={"memory_mb": 0.0125})  # many key ranges
    assert removed(small, [whole]) == expected
    in_batches = [stage.sign(whole.slice(i, 7)) for i in range(0, len(texts), 7)]
    decisions, _ = stage.cluster([pa.Table.from_batches(in_batches)])
    again = decisions[0].filter(decisions[0]["reason"].is_valid())["doc_id"].to_pylist()
    assert set(again) == expected


POOL = [" ".join(words(random.Random(i), 12)) for i in range(4)]
POOL += [f"{text} end" for text in POOL] + [f"{POOL[0]} and more than that", "short", "Short!", "", "中文", "中文。"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_removed_depends_on_the_documents_alone(data: st.DataObject) -> None:
    """Any order, shards, batches and memory give the same set; equal texts in different shards included."""
    texts = data.draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=24))
    kind = data.draw(st.sampled_from([MinHash, Exact]))
    options: dict[str, Any] = {"keep": data.draw(st.sampled_from(["longest", "first", "earliest"]))}
    if kind is MinHash:
        options |= {"ngram": 3, "bands": 20, "rows": 4, "max_cluster_share": 1.0}
        options["verify"] = data.draw(st.sampled_from(["none", "signature", "jaccard"]))
        options["scope"] = data.draw(st.sampled_from(["global", "source", ("source", "global")]))
    else:
        options |= {"by": data.draw(st.sampled_from(["text", "normalized"]))}
        options["scope"] = data.draw(st.sampled_from(["global", "source"]))
    sources = data.draw(st.lists(st.sampled_from("ab"), min_size=len(texts), max_size=len(texts)))
    whole = batch(texts, source=sources)
    stage = kind(**options)
    expected = removed(stage, [whole])
    order = data.draw(st.permutations(range(len(texts))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(texts)), max_size=4)))
    size = data.draw(st.integers(1, 9))
    mixed = whole.take(pa.array(order))
    shards = [mixed.slice(a, b - a) for a, b in pairwise([0, *cuts, len(texts)])]
    other = stage.model_copy(update={"memory_mb": len(texts) * 69 / 1e6})
    signed = [
        pa.Table.from_batches([other.sign(s.slice(i, size)) for i in range(0, s.num_rows, size)] or [other.sign(s)])
        for s in shards
    ]
    decisions, figures = other.cluster(signed)
    gone = {i for d in decisions for i in d.filter(d["reason"].is_valid())["doc_id"].to_pylist()}
    assert gone == expected
    assert figures["removed"] == len(gone)


def test_who_stays() -> None:
    text = "one two three four five six seven eight nine ten " * 4
    whole = batch(
        [text, text + "!", text + " - ", text],
        doc_id=["d", "c", "b", "a"],
        date=pa.array([None, "2024", "2023-05", "2023-06"]),
        **{"m.x": pa.array([1.0, None, 3.0, 2.0])},
    )
    stays = {
        keep: ({"a", "b", "c", "d"} - removed(MinHash(keep=keep), [whole])).pop()
        for keep in ("longest", "first", "earliest", "best(m.x)", "best(-m.x)")
    }
    assert stays == {"longest": "b", "first": "a", "earliest": "b", "best(m.x)": "b", "best(-m.x)": "d"}


def test_scope() -> None:
    text = "one two three four five six seven eight nine ten " * 4
    whole = batch([text] * 4, source=["a", "b", "a", "b"], dump=pa.array(["x", "x", None, None]))
    assert removed(MinHash(), [whole]) == {"d0001", "d0002", "d0003"}
    assert removed(MinHash(scope="source"), [whole]) == {"d0002", "d0003"}
    assert removed(MinHash(scope="dump"), [whole]) == {"d0001", "d0003"}
    assert removed(MinHash(scope="dump"), [whole.slice(0, 1), whole.slice(1)]) == {"d0001", "d0003"}


def test_scopes_one_after_the_other() -> None:
    """Within each dump, then across: b1 and b2 join a1 through b0, which stays in its dump and falls to a0."""
    text = "one two three four five six seven eight nine ten " * 4
    whole = batch(
        [text, text + "!", text, text + "?"],
        doc_id=["a0", "a1", "b0", "b1"],
        dump=pa.array(["a", "a", "b", "b"]),
    )
    stage = MinHash(scope=("dump", "global"))
    table = pa.Table.from_batches([stage.sign(whole)])
    decisions, figures = stage.cluster([table])
    assert decisions[0]["minhash.cluster"].to_pylist() == ["a1"] * 4
    assert decisions[0]["minhash.cluster_size"].to_pylist() == [4.0] * 4
    assert decisions[0]["reason"].to_pylist() == ["near_duplicate", None, "near_duplicate", "near_duplicate"]
    assert figures["joined"] == 3
    only = MinHash(scope=("dump",)).cluster([table])[0][0]
    assert only["minhash.cluster"].to_pylist() == ["a1", "a1", "b1", "b1"]


def test_against_an_earlier_run(tmp_path: Path) -> None:
    """What the older corpus has is dropped, however good; the older documents are neither touched nor counted."""
    old_text, new_text = (" ".join(words(random.Random(seed), 60)) for seed in (1, 2))
    stage = MinHash(against=(str(tmp_path),))
    old = stage.sign(batch([old_text, old_text + " again", "other"], doc_id=["old0", "old1", "new0"]))
    with pa.ipc.new_file(tmp_path / "part-00000.arrow", old.schema) as writer:
        writer.write_batch(old)
    fresh = batch([old_text + " much longer now", new_text, new_text + " x", "alone"])
    assert removed(stage, [fresh]) == {"d0000", "d0001"}
    decisions, figures = stage.cluster([pa.Table.from_batches([stage.sign(fresh)])])
    assert decisions[0]["minhash.cluster"].to_pylist() == ["old0", "d0002", "d0002"]
    assert (figures["documents"], figures["removed"], figures["removed_for_older"]) == (4, 2, 1)
    assert figures["sizes"] == {"2": 1, "3": 1}
    with pytest.raises(ClusterError, match="holds no signatures"):
        MinHash(against=(str(tmp_path / "none"),)).cluster([])
    with pytest.raises(ClusterError, match=r"part-00000\.arrow were made with"):
        MinHash(against=(str(tmp_path),), seed=2).cluster([])


def test_needs_name_all_columns_that_are_read() -> None:
    whole = batch(["a b"], **{"m.x": [1.0]}, other=[1])
    for keep in ("longest", "first", "earliest", "best(m.x)"):
        stage = MinHash(keep=keep)
        stage.sign(whole.select(["doc_id", *stage.needs]))
    assert MinHash().needs == ("text", "source", "dump")


def test_templates_stay_apart_when_verified() -> None:
    """Pages of one template chain: each shares three quarters with the next, the first nothing with the last."""
    rng = random.Random(2)
    stream = words(rng, 2_000)
    texts = [" ".join(stream[i * 20 : i * 20 + 200]) for i in range(60)]  # neighbours: J about 0.8
    assert len(removed(MinHash(), [batch(texts)])) > 50
    for verify in ("signature", "jaccard"):
        assert len(removed(MinHash(verify=verify, min_similarity=0.95), [batch(texts)])) == 0


def test_a_document_over_max_shingles_is_sampled_and_counted() -> None:
    rng = random.Random(8)
    long = words(rng, 5_000)
    copy = list(long)
    copy[2_500] = "changed"
    for verify in ("none", "jaccard"):
        stage = MinHash(max_shingles=1_000, verify=verify, min_similarity=0.98)
        texts = [" ".join(long), " ".join(copy), " ".join(words(rng, 5_000)), "short one"]
        signed = stage.sign(batch(texts))
        assert signed["shingles"].to_pylist() == [1_000, 1_000, 1_000, 1]
        _, figures = stage.cluster([pa.Table.from_batches([signed])])
        assert figures["capped"] == 3
        assert figures["removed"] == 1


def test_same_doc_id_in_two_shards_is_two_documents() -> None:
    text = "one two three four five six seven eight nine ten"
    shards = [batch([text], doc_id=["a"]), batch([text + " eleven"], doc_id=["a"]), batch(["else"], doc_id=["b"])]
    stage = MinHash(ngram=2, bands=30, rows=2)
    decisions, _ = stage.cluster([pa.Table.from_batches([stage.sign(s)]) for s in shards])
    assert [d["reason"].to_pylist() for d in decisions] == [["near_duplicate"], [None], []]


def test_empty_corpora() -> None:
    stage = MinHash(verify="jaccard")
    empty = pa.Table.from_batches([stage.sign(batch([]))])
    for tables in ([], [empty], [empty, empty]):
        decisions, figures = stage.cluster(tables)
        assert [d.num_rows for d in decisions] == [0] * len(tables)
        assert figures["removed"] == 0


# Errors


def test_doc_id_twice_in_a_shard_is_an_error() -> None:
    stage = MinHash()
    table = pa.Table.from_batches([stage.sign(batch(["a", "b", "c"], doc_id=["x", "y", "x"]))])
    with pytest.raises(ValueError, match=r"Shard 1 has 1 doc_ids more than once, for example \['x'\]"):
        stage.cluster([table.slice(0, 2), table])


def test_signatures_of_other_settings_are_an_error() -> None:
    table = pa.Table.from_batches([MinHash().sign(batch(["a"]))])
    with pytest.raises(ClusterError, match=r"shard 0 were made with minhash 2 .* bands 14 .*, not .* bands 15"):
        MinHash(bands=15).cluster([table])
    for other in (MinHash(seed=2), MinHash(ngram=4), MinHash(max_shingles=9), MinHash(normalize={"numbers": False})):
        with pytest.raises(ClusterError, match="were made with"):
            other.cluster([table])
    with pytest.raises(ClusterError, match="unknown settings"):
        MinHash().cluster([table.replace_schema_metadata(None)])
    with pytest.raises(ClusterError, match="lack the column shingle_set"):
        MinHash(verify="jaccard").cluster([table])


def test_a_cluster_beyond_the_limit_stops_the_stage() -> None:
    stage = MinHash(max_cluster=3)
    table = pa.Table.from_batches([stage.sign(batch(["one two three four five six"] * 4))])
    with pytest.raises(ClusterError, match=r"4 documents: more than max_cluster \(3\).*d0000.*verify: jaccard"):
        stage.cluster([table])
    many = pa.Table.from_batches([stage.sign(batch(["one two three"] * 1_200 + words(random.Random(0), 700)))])
    with pytest.raises(ClusterError, match=r"63% of the source web, more than max_cluster_share \(50%\)"):
        MinHash().cluster([many])
    decisions, _ = MinHash(max_cluster_share=0.7).cluster([many])
    assert decisions[0].num_rows == 1_200


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"keep": "biggest"}, "keep is longest"),
        ({"threshold": 0.7, "bands": 4}, "bands is set too"),
        ({"permutations": 64}, "set bands and rows"),
        ({"bandz": 4}, "Extra inputs"),
    ],
)
def test_wrong_settings(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MinHash(**given_)


def test_threshold_chooses_bands_and_rows() -> None:
    stage = MinHash(threshold=0.75, permutations=112)
    assert stage.shape == (11, 10)
    assert "band_10" in stage.sign(batch(["a b"])).schema.names


def test_an_unknown_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"asks for the column q\.x, which these documents do not have"):
        MinHash(keep="best(q.x)").sign(batch(["a"]))


@pytest.mark.parametrize("verify", ["none", "signature", "jaccard"])
def test_warm_compiles_what_a_run_calls(verify: str, tmp_path: Path) -> None:
    """A kernel that a worker compiles a second time, for read-only arrays say, costs seconds on each worker."""
    modules = (shingles, kernel, hashing, cluster)
    for module in modules:
        module.warm()
    kernels = {f"{m.__name__}.{n}": v for m in modules for n, v in vars(m).items() if hasattr(v, "signatures")}
    before = {name: len(k.signatures) for name, k in kernels.items()}
    path = tmp_path / "part.arrow"
    for stage in (MinHash(verify=verify), MinHash(verify=verify, scope="source"), Exact(), Exact(by="normalized")):
        text = pa.array(["zz", *["a b c d e f"] * 3, "x y"], pa.string()).slice(1)
        signed = stage.sign(batch([""] * 4).set_column(4, "text", text))
        with pa.ipc.new_file(path, signed.schema) as writer:
            writer.write_batch(signed)
        stage.cluster([pa.ipc.open_file(pa.memory_map(str(path))).read_all()])
    assert {name: len(k.signatures) for name, k in kernels.items()} == before
