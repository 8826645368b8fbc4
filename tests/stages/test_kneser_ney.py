"""The Kneser-Ney estimator: by hand, against a slow implementation of the definition, and against lmplz's figures."""

import ast
import functools
import itertools
import json
import math
import tracemalloc
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels import counting
from gristmill.stages.kneser_ney import FALLBACK_DISCOUNTS, ModelError, TokenFile, load_arpa

LMPLZ = Path(__file__).parents[1] / "data" / "lmplz"


def lines(text):
    return np.frombuffer(text.encode(), np.uint8).copy()


def estimate(text, folder, order, prune=(), max_memory_mb=100.0):
    """-> (estimate, path of the ARPA file)."""
    path = folder / "lm.arpa"
    with TokenFile(folder) as tokens:
        tokens.add(lines(text))
        return tokens.estimate(path, order=order, prune=prune, max_memory_mb=max_memory_mb), path


def read_arpa(path):
    """-> {n-gram: (log10 p, log10 back-off or None)}."""
    grams = {}
    for line in path.read_text().splitlines():
        if "\t" in line:
            prob, words, *backoff = line.split("\t")
            grams[tuple(words.split(" "))] = (float(prob), float(backoff[0]) if backoff else None)
    return grams


def slow_kneser_ney(text, order, prune=()):
    """Modified Kneser-Ney from its definition, dictionaries and floats only -> as `read_arpa`."""
    thresholds = (list(prune) or [0]) + [(list(prune) or [0])[-1]] * order
    raw = Counter()
    for line in text.split("\n"):
        if line.split():
            words = ["<s>", *line.split(), "</s>"]
            for k in range(1, order + 1):
                raw.update(tuple(words[i : i + k]) for i in range(len(words) - k + 1))
    left = defaultdict(set)
    for gram in raw:
        if len(gram) > 1:
            left[gram[1:]].add(gram[0])
    count = {g: n if len(g) == order or g[0] == "<s>" else len(left[g]) for g, n in raw.items() if g != ("<s>",)}
    discount = {}
    for k in range(1, order + 1):
        n = Counter(c for g, c in count.items() if len(g) == k)
        try:
            y = n[1] / (n[1] + 2 * n[2])
            d = [j - (j + 1) * y * n[j + 1] / n[j] for j in (1, 2, 3)]
            d = d if all(0 < d[j - 1] <= j for j in (1, 2, 3)) else FALLBACK_DISCOUNTS
        except ZeroDivisionError:
            d = FALLBACK_DISCOUNTS
        discount[k] = lambda c, d=d: 0.0 if c == 0 else d[min(c, 3) - 1]
    extensions = defaultdict(list)
    for gram in count:
        extensions[gram[:-1]].append(gram)

    def stays(gram):
        return len(gram) == 1 or raw[gram] > thresholds[len(gram) - 1]

    @functools.cache
    def total_and_backoff(context):
        total = sum(count[g] for g in extensions[context])
        freed = sum(discount[len(g)](count[g]) if stays(g) else count[g] for g in extensions[context])
        return total, freed / total

    words = len([g for g in count if len(g) == 1]) + 1  # and <unk>

    @functools.cache
    def probability(gram):
        if not gram:
            return 1 / words
        lower = probability(gram[1:])
        if gram[:-1] not in extensions:
            return lower
        total, backoff = total_and_backoff(gram[:-1])
        seen = count.get(gram, 0)
        own = (seen - discount[len(gram)](seen)) / total if seen and stays(gram) else 0.0
        return own + backoff * lower

    out = {}
    for gram in [*count, ("<unk>",), ("<s>",)]:
        if gram in (("<unk>",), ("<s>",)) or stays(gram):
            backoff = None if len(gram) == order else (total_and_backoff(gram)[1] if gram in extensions else 1.0)
            prob = -99 if gram == ("<s>",) else math.log10(probability(gram))
            out[gram] = (prob, None if backoff is None else math.log10(backoff))
    return out


def same(found, expected, tolerance=1.5e-6):
    assert found.keys() == expected.keys()
    for gram, (prob, backoff) in expected.items():
        assert found[gram][0] == pytest.approx(prob, abs=tolerance), gram
        assert (found[gram][1] is None) == (backoff is None)
        assert backoff is None or found[gram][1] == pytest.approx(backoff, abs=tolerance), gram


def docstrings(limit):
    """Real English: docstrings of the standard library, lower case, words and single punctuation marks."""
    found = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        found += [" ".join(line.split()) for n in nodes for line in (ast.get_docstring(n) or "").lower().split("\n")]
        if sum(map(len, found)) > limit:
            break
    return "\n".join(line for line in found if line) + "\n"


WORKED = "a b\na b\na c\n"


def test_worked_example(tmp_path):
    """Left contexts: a 1, b 1, c 1, </s> 2; no word has three, so D = 0.5, 1, 1.5 and the freed share is
    (3 * 0.5 + 1) / 5 = 1/2 over a, b, c, </s>, <unk>. Bigrams occur 3, 2, 2, 1, 1 times: Y = 1/3, D = 1/3, 3/2, 3."""
    found, path = estimate(WORKED, tmp_path, 2)
    assert found.distinct == (6, 5)
    assert found.fallback == (1,)
    assert found.discounts[1] == pytest.approx((1 / 3, 3 / 2, 3))
    expected = {
        ("<unk>",): (0.1, 1), ("</s>",): (0.3, 1), ("a",): (0.2, 11 / 18), ("b",): (0.2, 3 / 4), ("c",): (0.2, 1 / 3),
        ("<s>", "a"): (1 * 0.2, None), ("a", "b"): (1 / 6 + 11 / 90, None), ("a", "c"): (2 / 9 + 11 / 90, None),
        ("b", "</s>"): (1 / 4 + 3 / 4 * 0.3, None), ("c", "</s>"): (2 / 3 + 1 / 3 * 0.3, None),
    }  # fmt: skip
    logs = {g: (math.log10(p), None if b is None else math.log10(b)) for g, (p, b) in expected.items()}
    same(read_arpa(path), logs | {("<s>",): (-99, math.log10(1))})


def test_pruning_gives_the_mass_to_the_back_off(tmp_path):
    """`a c` and `c </s>` occur once. Of context a stay 2 of 3 counts less 3/2: back-off (3/2 + 1) / 3."""
    found, path = estimate(WORKED, tmp_path, 2, prune=(0, 1))
    assert found.kept == (6, 3)
    grams = read_arpa(path)
    assert ("a", "c") not in grams
    assert grams[("a",)][1] == pytest.approx(math.log10(2.5 / 3), abs=1e-6)
    assert grams[("a", "b")][0] == pytest.approx(math.log10(0.5 / 3 + 2.5 / 3 * 0.2), abs=1e-6)
    assert load_arpa(path).score("c", bos=False, eos=False) == pytest.approx(math.log10(0.2), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9).map(" ".join), min_size=1, max_size=40),
    st.integers(2, 5),
    st.sampled_from([(), (0, 0, 1), (0, 1), (0, 1, 2)]),
)
def test_agrees_with_the_definition(tmp_path_factory, text_lines, order, prune):
    text = "\n".join(text_lines) + "\n"
    prune = prune[:order]
    folder = tmp_path_factory.mktemp("kn")
    if max(len(line.split()) for line in text_lines) + 2 < order:
        with pytest.raises(ModelError, match="long enough for an n-gram of order"):
            estimate(text, folder, order, prune)
        return
    _, path = estimate(text, folder, order, prune)
    same(read_arpa(path), slow_kneser_ney(text, order, prune))


def test_agrees_with_the_definition_on_real_text(tmp_path):
    text = docstrings(60_000)
    for order, prune in ((3, (0, 0, 1)), (4, ())):
        found, path = estimate(text, tmp_path, order, prune)
        assert found.fallback == ()
        same(read_arpa(path), slow_kneser_ney(text, order, prune))


FIGURES = json.loads((LMPLZ / "figures.json").read_text())


@pytest.mark.parametrize("figures", FIGURES["models"], ids=lambda m: f"order {m['order']}, prune {m['prune']}")
def test_agrees_with_lmplz(tmp_path, figures):
    found, path = estimate((LMPLZ / "text.txt").read_text(), tmp_path, figures["order"], figures["prune"])
    assert list(found.kept) == figures["counts"]
    assert np.allclose(found.discounts, figures["discounts"], atol=1e-5)
    model = load_arpa(path)
    for line, expected in zip(FIGURES["lines"], figures["log10"], strict=True):
        assert model.score(line) == pytest.approx(expected, abs=1e-4)
    for line, expected in zip(FIGURES["lines"], figures["full"], strict=False):
        assert [p for p, _, _ in model.full_scores(line)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("order", "prune"), [(2, ()), (3, (0, 0, 1)), (5, ()), (5, (0, 1, 2))])
def test_probabilities_sum_to_one(tmp_path, order, prune):
    import kenlm

    text = docstrings(20_000)
    _, path = estimate(text, tmp_path, order, prune)
    model = load_arpa(path)
    vocabulary = [g[0] for g in read_arpa(path) if len(g) == 1 and g[0] != "<s>"]
    words = text.split()
    contexts = [words[i : i + n] for n in range(6) for i in range(0, len(words) - n, len(words) // 4)]
    contexts += [["unseen"], [words[5], "unseen"], ["unseen", words[5]]]
    for context in contexts:
        for begin in (True, False):
            state, after = kenlm.State(), kenlm.State()
            (model.BeginSentenceWrite if begin else model.NullContextWrite)(state)
            for word in context:
                model.BaseScore(state, word, after)
                state, after = after, state
            total = sum(10 ** model.BaseScore(state, word, after) for word in vocabulary)
            assert total == pytest.approx(1, abs=2e-5), context


def test_five_grams_of_little_text_have_no_nan(tmp_path):
    _, path = estimate(docstrings(300_000)[:300_000], tmp_path, 5)
    model = load_arpa(path)
    assert math.isfinite(model.score("return the name of the file"))
    grams = read_arpa(path)
    assert all(math.isfinite(p) and p <= 0 and math.isfinite(b or 0) for p, b in grams.values())


def test_little_memory_gives_the_same_bytes(tmp_path):
    draw = np.random.default_rng(3).zipf(1.3, 300_000) % 2_000
    data = lines("\n".join(" ".join(map(str, row)) for row in draw.reshape(-1, 20)) + "\n")
    peaks, files = [], []
    for budget in (200.0, 2.0, 0.2):
        with TokenFile(tmp_path) as tokens:
            tokens.add(data)
            tracemalloc.start()
            tokens.estimate(tmp_path / "lm.arpa", order=4, max_memory_mb=budget)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        files.append((tmp_path / "lm.arpa").read_bytes())
        assert sorted(p.name for p in tmp_path.iterdir()) == ["lm.arpa"]
    assert files[0] == files[1] == files[2]
    assert peaks[0] > 20e6
    assert peaks[1] < 12e6  # 8 MB of them are the buffer of the ARPA file


def test_batches_do_not_matter(tmp_path):
    text = docstrings(30_000)
    _, path = estimate(text, tmp_path, 3)
    whole = path.read_bytes()
    with TokenFile(tmp_path) as tokens:
        for line in text.splitlines(keepends=True):
            tokens.add(lines(line))
        tokens.estimate(path, order=3)
    assert path.read_bytes() == whole


def test_many_words_grow_the_table(tmp_path):
    """More words than the first table has slots, and a line longer than one call encodes."""
    text = " ".join(f"w{i}" for i in range(200_000)) + "\n"
    found, path = estimate(text, tmp_path, 2)
    assert found.words == 200_003
    grams = read_arpa(path)
    assert ("w199998", "w199999") in grams
    assert ("w199999", "</s>") in grams


def test_encoding_stays_inside_its_buffers():
    """The text sits between poison; the ids must be those of the text alone, and nothing after them is touched."""
    poison = np.full(64, ord("z"), np.uint8)
    text = lines("ab c\n\nc ab d")
    data = np.concatenate([poison, text, poison])
    hashes, ids = np.zeros(16, np.uint64), np.zeros(16, np.int32)
    words, ends = np.full(64, 7, np.uint8), np.full(16, -1, np.int64)
    ends[:3] = (5, 8, 12)
    out = np.full(20, -7, np.int32)
    n, known = counting.encode_lines(data, 64, 64 + len(text), hashes, ids, 3, words, ends, out)
    assert out[:n].tolist() == [1, 3, 4, 2, 1, 4, 3, 5, 2]
    assert known == 6
    assert words[12:16].tobytes() == b"abcd"
    assert set(out[n:].tolist()) == {-7}
    assert set(words[16:].tolist()) == {7}
    assert set(ends[6:].tolist()) == {-1}


@given(st.lists(st.integers(0, 2**40), max_size=300), st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_sort_keys(values, guard):
    n = len(values)
    keys = np.array(values + [-1] * guard, np.int64)
    order, keys_2, order_2 = np.zeros(len(keys), np.int32), keys.copy(), np.zeros(len(keys), np.int32)
    in_second = counting.sort_keys(keys, order, keys_2, order_2, n, 41)
    assert (keys_2 if in_second else keys)[:n].tolist() == sorted(values)
    assert (order_2 if in_second else order)[:n].tolist() == np.argsort(np.array(values), kind="stable").tolist()
    assert keys[n:].tolist() == keys_2[n:].tolist() == [-1] * guard


def test_ranges_cover_every_prefix():
    bounds, largest = counting.ranges(np.array([3, 9, 1, 1, 1, 5], np.int32), 4)
    assert bounds.tolist() == [0, 1, 2, 5, 6]
    assert largest == 9
    assert list(itertools.pairwise(bounds.tolist())) == [(0, 1), (1, 2), (2, 5), (5, 6)]


@pytest.mark.parametrize(
    ("text", "order", "prune", "message"),
    [
        ("", 3, (), "The training text is empty"),
        ("\n\n", 3, (), "The training text is empty"),
        ("a b\n", 5, (), "No line of the training text is long enough for an n-gram of order 5"),
        ("a b\n", 1, (), "`order` is 1; KenLM scores models of order 2 to 6"),
        ("a b\n", 7, (), "`order` is 7"),
        ("a b\n", 2, (1,), "must begin with 0"),
        ("a b\n", 3, (0, 2, 1), "must not fall"),
        ("a b\n", 2, (0, 0, 1), "3 values for 2 orders"),
    ],
)
def test_what_makes_no_model(tmp_path, text, order, prune, message):
    with pytest.raises(ModelError, match=message):
        estimate(text, tmp_path, order, prune)
    assert not (tmp_path / "lm.arpa").exists()


def test_warm_compiles_without_error():
    counting.warm()
    assert counting.select.signatures
