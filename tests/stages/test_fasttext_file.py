"""Our reading and running of fastText models against fastText itself: same label, same score to the last bit."""

import math
import random

import fasttext
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.stages.fasttext_file import FileError, Model, _tree, read_model
from gristmill.stages.kernels import fasttext_lines as kernel
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.language import bundled_model, sample
from gristmill.stages.train_fasttext import _zeroed_memory

SCRIPTS = "aZé ßıșўЖџдљαωאבىعदेबংলກຂ中文字かなカ한글ქართულიᐃᓄᒃ😀\u0301\u200d\ufeff-.'0179"
SPACES = " \t\n\r\v\f\0\x1c\x85\xa0\u3000"
WORDS = ["</s>", "__label__en", "__label__", "__label__zz", "de", "and", "the", "<", ">", "<de>", "の", "và"]
texts = st.lists(
    st.one_of(st.sampled_from(WORDS), st.text(st.sampled_from(SCRIPTS), max_size=12), st.text(max_size=6)),
    max_size=25,
).flatmap(lambda words: st.lists(st.sampled_from(SPACES), min_size=len(words), max_size=len(words)).map(
    lambda spaces: "".join(w + s for w, s in zip(words, spaces, strict=True))
))  # fmt: skip


@pytest.fixture(scope="module")
def lid() -> tuple[Model, fasttext.FastText]:
    return read_model(bundled_model()), fasttext.load_model(str(bundled_model())).f


def lines(number=300):
    """Of two labels, with a few common words each."""
    draw = random.Random(3)
    sides = {"good": "the mill grinds grain on stones".split(), "bad": "login menu über 中文字 cookie".split()}
    return "".join(
        f"__label__{label} {' '.join(draw.choices(words, k=draw.randint(1, 9)))}\n"
        for _ in range(number)
        for label, words in sides.items()
    )


KINDS = {
    "softmax": {},
    "words only, tree": {"loss": "hs"},
    "each label": {"loss": "ova", "dim": 7},
    "sampled": {"loss": "ns", "dim": 33},
    "word n-grams": {"wordNgrams": 3, "bucket": 1_000, "dim": 20},
    "letters": {"minn": 1, "maxn": 4, "bucket": 997},
    "letters and words": {"minn": 2, "maxn": 3, "wordNgrams": 2, "bucket": 333, "loss": "hs"},
    "no buckets": {"wordNgrams": 1, "minn": 0, "maxn": 0, "bucket": 0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """-> for each kind, the file."""
    folder = tmp_path_factory.mktemp("fasttext")
    (folder / "train.txt").write_text(lines(), "utf-8")
    files = {}
    usual = {"dim": 16, "epoch": 3, "lr": 0.3, "verbose": 0, "thread": 1, "minCount": 1}
    with _zeroed_memory():  # else fastText may stop at a NaN
        for kind, options in KINDS.items():
            files[kind] = folder / f"{kind}.bin"
            fasttext.train_supervised(str(folder / "train.txt"), **usual | options).save_model(str(files[kind]))
    return files


def theirs(model, text, k=1):
    return model.predict(text.replace("\n", " ") + "\n", k, 0.0, "strict")


def check(ours, model, documents, sample_bytes=None):
    chosen, scores = ours.best(pa.array(documents, pa.string()), sample_bytes)
    for text, label, score in zip(documents, chosen.tolist(), scores.tolist(), strict=True):
        found = theirs(model, sample(np.frombuffer(text.encode(), np.uint8), sample_bytes))
        assert (score, ours.labels[label]) == found[0] if found else label == -1


def test_no_word_and_the_strangest_words(lid):
    long = ["x" * 20_000, "é" * 5_000, "a b " * 5_000, "中" * 9_000, "\u0301" * 50]
    check(*lid, ["", " ", "\n\n", "\0", "</s>", "</s> Haus", "Haus </s> house", "__label__en", "__label__zz a", *long])


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, max_size=4))
@example(["", "a"])
def test_any_text(lid, documents):
    check(*lid, documents)


@settings(max_examples=200, deadline=None)
@given(st.lists(texts.map(lambda text: text * 9), max_size=3), st.integers(100, 400))
def test_samples(lid, documents, sample_bytes):
    """The kernel cuts a document as `sample` does."""
    check(*lid, documents, sample_bytes)


def test_samples_of_real_texts(lid, english_documents):
    for sample_bytes in (100, 101, 250, 1_000, None):
        check(*lid, english_documents[:60], sample_bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind(trained, kind, english_documents):
    """A label's probability is what fastText says when it is asked for all labels."""
    ours, model = read_model(trained[kind]), fasttext.load_model(str(trained[kind])).f
    rough = "the mill </s> menu|the  stones\tgrain|über 中文字|the grain the|nothing known here|  ".split("|")
    documents = [*rough, *english_documents[:40]]
    check(ours, model, documents)
    assert sorted(ours.labels) == ["__label__bad", "__label__good"]
    for label in ours.labels:
        scores = ours.probabilities(pa.array(documents), label)
        for text, score in zip(documents, scores.tolist(), strict=True):
            found = {name: value for value, name in theirs(model, text, -1)}
            assert score == found.get(label, 0.0) if found else math.isnan(score)


@settings(max_examples=100, deadline=None)
@given(documents=st.lists(texts, max_size=3))
@pytest.mark.parametrize("kind", ["letters", "letters and words"])
def test_any_text_by_models_of_letters(trained, kind, documents):
    check(read_model(trained[kind]), fasttext.load_model(str(trained[kind])).f, documents)


@pytest.mark.parametrize("options", [{}, {"qnorm": True, "qout": False}, {"cutoff": 300, "dsub": 3}])
def test_quantized_models(tmp_path, options, english_documents):
    """With norms, with parts of uneven width, with pruned words and buckets."""
    training = tmp_path / "train.txt"
    draw = random.Random(5)
    words = [f"{draw.choice('bdgklmn')}{draw.choice('aeiou')}{draw.choice('rstvwz')}{i}" for i in range(400)]
    training.write_text(
        "".join(f"__label__l{i % 5} {' '.join(draw.choices(words[i % 5 :: 5], k=9))}\n" for i in range(900))
    )
    with _zeroed_memory():
        model = fasttext.train_supervised(
            str(training), dim=10, epoch=2, verbose=0, thread=1, minn=2, maxn=3, bucket=500, loss="hs"
        )
        model.quantize(input=str(training), **options)
    model.save_model(str(tmp_path / "small.ftz"))
    check(read_model(tmp_path / "small.ftz"), model.f, [*(" ".join(words[i::40]) for i in range(40)), "", "häßlich"])


def test_nothing_is_read_outside_the_text(lid):
    """Guard bytes before, behind and between: an answer does not depend on them."""
    ours = lid[0]
    documents = ["le chat", "", "中", "the cat sat </s", "x" * 300]
    for guard in (b"\xff", b"a", b"\0", b"\x80"):
        data = np.frombuffer(guard * 64 + "".join(documents).encode() + guard * 64, np.uint8)
        offsets = 64 + np.cumsum([0, *(len(text.encode()) for text in documents)])
        for sample_bytes in (0, 100):
            found = [hidden(ours.network, data, offsets, sample_bytes)]
            ends, plain = string_views(pa.array(documents))
            found.append(hidden(ours.network, plain, ends, sample_bytes))
            assert (found[0] == found[1]).all()


def hidden(network, data, offsets, sample_bytes):
    means, seen = np.zeros((len(offsets) - 1, 16), np.float32), np.zeros(len(offsets) - 1, np.int64)
    scratch = np.empty(kernel.scratch_bytes(offsets, network.word_ngrams), np.uint8)
    kernel.hidden(network.plan(), data, offsets, sample_bytes, scratch, means, seen)
    return np.column_stack([means, seen])


def test_bytes_that_are_no_utf8(lid):
    """Nothing breaks; with them a text has no right answer, but fastText's own."""
    draw = random.Random(1)
    documents = [bytes(draw.choices(range(256), k=draw.randint(0, 400))) for _ in range(200)]
    for sample_bytes in (None, 100):
        chosen, scores = lid[0].best(pa.array(documents, pa.binary()), sample_bytes)
        assert ((chosen >= 0) & (scores > 0)).all()


def test_a_tree_by_hand():
    """Counts 8, 3, 2: the two rarest meet first, and the frequent label is one step from the root."""
    children, paths, ends = _tree(np.array([8, 3, 2]))
    assert children.tolist() == [[2, 1], [3, 0]]
    assert [paths[ends[i] : ends[i + 1]].tolist() for i in range(3)] == [[3], [2, 1], [2, 0]]


def test_files_that_cannot_be_used(tmp_path, trained):
    whole = bundled_model().read_bytes()
    bad = tmp_path / "bad.ftz"
    for data, message in (
        (b"", "is empty"),
        (b"no model" * 10, "is not a fastText model"),
        *((whole[:size], "cut short") for size in (30, 70, 90, 5_000, 200_000, 600_000, len(whole) - 1)),
        (whole[:64] + b"\xff" * 28 + whole[92:], "labels and"),
    ):
        bad.write_bytes(data)
        with pytest.raises(FileError, match=message):
            read_model(bad)


def test_a_damaged_file_never_breaks_the_process(tmp_path):
    """Any byte of the head may be another: an error, or answers."""
    whole = bytearray(bundled_model().read_bytes())
    draw = random.Random(4)
    head = 92
    tail = whole.index(b"__label__vep") + 40
    for at in [*range(8, head, 3), *draw.choices(range(head, tail), k=20), *range(tail, tail + 60, 4)]:
        damaged = whole.copy()
        damaged[at] ^= 1 << draw.randrange(8)
        (tmp_path / "damaged.ftz").write_bytes(damaged)
        try:
            model = read_model(tmp_path / "damaged.ftz")
        except (FileError, UnicodeDecodeError):
            continue
        if model is not None:
            try:
                model.best(pa.array(["the cat sat on the mat", "中文字", ""]), 100)
            except FileError:
                continue


def test_models_that_are_left_to_fasttext(tmp_path):
    data = tmp_path / "train.txt"
    data.write_text("the house and the tree\n" * 50)
    fasttext.train_unsupervised(str(data), epoch=1, dim=2, bucket=10, verbose=0, thread=1).save_model(
        str(tmp_path / "vectors.bin")
    )
    assert read_model(tmp_path / "vectors.bin") is None
