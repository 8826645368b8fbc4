"""`variant: dolma` of the Gopher stages: against values that dolma gave (tests/data/gopher_dolma.json), and by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.listing import list_shards
from gristmill.pipelines.plan import make_plan
from gristmill.stages.gopher import GopherQuality, GopherRepetition
from gristmill.stages.kernels import dolma

QUALITY, REPETITION = GopherQuality(variant="dolma"), GopherRepetition(variant="dolma")
NAMES = {
    "words": "word_count",
    "median_word_chars": "median_word_length",
    "symbol_words": "symbol_to_word_ratio",
    "alphabetic_words": "fraction_of_words_with_alpha_character",
    "stop_word_occurrences": "required_word_count",
    "bullet_lines": "fraction_of_lines_starting_with_bullet_point",
    "ellipsis_lines": "fraction_of_lines_ending_with_ellipsis",
    "chars": "character_count",
    "duplicate_lines": "fraction_of_duplicate_lines",
    "duplicate_line_chars": "fraction_of_characters_in_duplicate_lines",
    **{f"top_{n}_gram_chars": f"fraction_of_characters_in_most_common_{n}grams" for n in (2, 3, 4)},
    **{f"duplicate_{n}_gram_chars": f"fraction_of_characters_in_duplicate_{n}grams" for n in range(5, 11)},
}


def measured(texts) -> list[dict[str, float]]:  # type: ignore[no-untyped-def]
    """Both stages' measures of each text, by the name behind the dot."""
    column = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())
    batch = pa.RecordBatch.from_arrays([column], names=["text"])
    found = {**QUALITY.measure(batch), **REPETITION.measure(batch)}
    return [{name.split(".")[1]: float(values[i]) for name, values in found.items()} for i in range(len(column))]


@pytest.fixture(scope="module")
def oracle() -> list[tuple[str, dict[str, float]]]:
    path = Path(__file__).parents[1] / "data" / "gopher_dolma.json"
    return [(text, values) for text, values in json.loads(path.read_text(encoding="ascii"))]


def test_every_measure_equals_dolmas(oracle: list[tuple[str, dict[str, float]]]) -> None:
    """dolma gives no n-gram measure to a text with fewer than n words; here it is 0, which fails no limit."""
    found = measured([text for text, _ in oracle])
    assert len(found) > 120
    for (text, values), mine in zip(oracle, found, strict=True):
        assert set(values) <= set(NAMES.values())
        expected = {name: values.get(theirs, 0.0) for name, theirs in NAMES.items()}
        assert mine == pytest.approx(expected, rel=0, abs=1e-12), repr(text[:200])
    for name, theirs in NAMES.items():  # nothing is compared that is the same everywhere
        assert len({values.get(theirs, 0.0) for _, values in oracle}) > 5, name


# One text a difference, small enough to count. In each the other variant would say something else.


def test_words_are_what_white_space_separates() -> None:
    """Two: "don't" and "stop,". In spaCy's English "don't" is two, and the comma is a word that does not count."""
    text = "don't stop,"
    assert measured([text])[0]["words"] == 2
    assert GopherQuality().measure(pa.RecordBatch.from_pydict({"text": [text]}))["gopher_quality.words"][0] == 3


def test_word_length_is_the_median() -> None:
    """Lengths 1, 1, 2, 10: (1 + 2) / 2, where the mean is 3.5; of 1, 2, 10 the one in the middle."""
    found = measured(["a b cd abcdefghij", "a cd abcdefghij"])
    assert [row["median_word_chars"] for row in found] == [1.5, 2]


def test_symbols_are_words_that_hold_one() -> None:
    """ "##" is one word, "b…" another; "..." is none: 2 of 4."""
    assert measured(["## b… ... d"])[0]["symbol_words"] == 2 / 4


def test_stop_words_count_every_time_in_the_case_written() -> None:
    """the, the and of; "The" and "of," are other words."""
    assert measured(["the the The of of,"])[0]["stop_word_occurrences"] == 3


def test_bullets_are_stars_and_hyphens_at_the_very_start() -> None:
    """ "* a" and "- b" of four lines; " * c" is indented and "•" is no bullet."""
    assert measured(["* a\n- b\n * c\n• d"])[0]["bullet_lines"] == 2 / 4


def test_an_ellipsis_line_ends_with_the_one_character() -> None:
    """ "a…" of three; "b..." is none, and "c… " ends with a space."""
    assert measured(["a…\nb...\nc… "])[0]["ellipsis_lines"] == 1 / 3


def test_duplicate_lines_are_all_copies() -> None:
    """Lines "a b", "c", "a b" (line breaks together are one): 2 of 3, with 2 * 3 characters over 5 in words."""
    (found,) = measured(["a b\n\nc\na b"])
    assert found["duplicate_lines"] == 2 / 3
    assert found["duplicate_line_chars"] == 6 / 5


def test_an_empty_line_is_one_at_the_start_and_at_the_end_only() -> None:
    """ "", "a", "b" and "": the two empty ones are copies."""
    assert measured(["\n\na\n\nb\n"])[0]["duplicate_lines"] == 2 / 4


def test_top_ngrams_are_measured_without_spaces() -> None:
    """ "ab c" three times, 3 letters each, of 9; "ab c ab" twice, 5 letters; "ab c ab c" twice, 6 letters."""
    (found,) = measured(["ab c ab c ab c"])
    assert found["top_2_gram_chars"] == 3 * 3 / 9
    assert found["top_3_gram_chars"] == 2 * 5 / 9
    assert found["top_4_gram_chars"] == 2 * 6 / 9


def test_of_equally_common_ngrams_the_first_counts() -> None:
    """ "a bb" and "ccc d" twice each: 2 * 3 of 14; none repeats in the second text: "a bb", 3 of 7."""
    found = measured(["a bb ccc d ccc d a bb", "a bb ccc d"])
    assert [row["top_2_gram_chars"] for row in found] == [6 / 14, 3 / 7]


def test_duplicate_ngrams_overlap_and_all_copies_count() -> None:
    """Seven times "ab": three 5-grams, all equal, 30 of 30. Then "a b c d e f a b c d e": "a b c d e" twice of 7."""
    found = measured(["ab " * 7, "a b c d e f a b c d e"])
    assert [row["duplicate_5_gram_chars"] for row in found] == [1, 10 / 35]
    assert [row["duplicate_6_gram_chars"] for row in found] == [1, 0]


def test_ngrams_are_words_not_letters() -> None:
    """ "1 00" and "10 0" are the same letters, but other words."""
    assert measured(["1 00 x y z 10 0 x y z"])[0]["duplicate_5_gram_chars"] == 0


def reference(text: str) -> dict[str, float]:
    """The definitions in Python's own strings, written from `gopher_dolma`'s docstring."""
    words, lines = text.split(), re.split(r"\n+", text) if text else []
    chars = sum(map(len, words))

    def share(count: float, of: float) -> float:
        return count / of if of else 0.0

    def copies(things):  # type: ignore[no-untyped-def]
        counts = Counter(things)
        return [thing for thing in things if counts[thing] > 1]

    out = {
        "words": len(words),
        "median_word_chars": float(median(map(len, words))) if words else 0.0,
        "symbol_words": share(sum("#" in w or "…" in w for w in words), len(words)),
        "alphabetic_words": share(sum(any(map(str.isalpha, w)) for w in words), len(words)),
        "stop_word_occurrences": sum(w in QUALITY.stop_words for w in words),
        "bullet_lines": share(sum(line[:1] in ("*", "-") for line in lines if line), len(lines)),
        "ellipsis_lines": share(sum(line[-1:] == "…" for line in lines), len(lines)),
        "chars": len(text),
        "duplicate_lines": share(len(copies(lines)), len(lines)),
        "duplicate_line_chars": sum(map(len, copies(lines))) / max(chars, 1),
    }
    for n in range(2, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        if n < 5:
            top, times = Counter(grams).most_common(1)[0] if grams else ((), 0)
            out[f"top_{n}_gram_chars"] = share(times * len("".join(top)), chars)
        else:
            letters = [sum(len("".join(gram)) for gram in part) for part in (copies(grams), grams)]
            out[f"duplicate_{n}_gram_chars"] = share(*letters)
    return out


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab \n\n#…-*.é日😀\x85\x00"), max_size=60), min_size=1, max_size=4))
def test_any_text_is_measured_as_defined(texts: list[str]) -> None:
    assert measured(texts) == [reference(text) for text in texts]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "ab", "1", "00", "10", "0", "é"]), max_size=80))
def test_any_words_are_measured_as_defined(words: list[str]) -> None:
    assert measured([" ".join(words)]) == [reference(" ".join(words))]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=40).filter(str.isprintable), min_size=1, max_size=8), st.data())
def test_order_slices_and_batches_change_no_value(texts: list[str], data: st.DataObject) -> None:
    rows = measured(texts)
    order = data.draw(st.permutations(range(len(texts))))
    cut = data.draw(st.integers(0, len(texts)))
    assert [measured([text])[0] for text in texts] == rows
    assert measured([texts[i] for i in order]) == [rows[i] for i in order]
    assert measured(pa.array(texts, pa.string()).slice(cut)) == rows[cut:]


def test_no_byte_outside_a_document_is_read(guarded, adversarial_documents: list[str]) -> None:  # type: ignore[no-untyped-def]
    texts = [text[:80] for text in adversarial_documents]
    expected = measured(texts)
    for guard in (b"\xff" * 64, b"\n" * 64, b"the " * 16, b"\xe2\x80" * 16):
        assert measured(guarded(texts, guard)) == expected


def test_long_words_lines_and_documents() -> None:
    texts = ["x" * 10_000_000, "ab " * 1_000_000, "\n" * 1_000_000, "é\n" * 500_000]
    one, many, breaks, lines = measured(texts)
    assert (one["words"], one["median_word_chars"], one["top_2_gram_chars"]) == (1, 10_000_000, 0)
    assert (many["words"], many["top_2_gram_chars"], many["duplicate_10_gram_chars"]) == (1_000_000, 1.999998, 1)
    assert (breaks["words"], breaks["duplicate_lines"]) == (0, 1)
    assert lines["duplicate_lines"] == 500_000 / 500_001


def test_decisions_are_those_of_dolmas_mixer(oracle: list[tuple[str, dict[str, float]]], outcomes) -> None:  # type: ignore[no-untyped-def]
    """The filters of configs/dolma-v1_5/mixing/cc-head.yaml, in their order: the first that is met is the reason."""
    grams = dict(zip((2, 3, 4), (0.2, 0.18, 0.16), strict=True))
    repeated = dict(zip(range(5, 11), (0.15, 0.14, 0.13, 0.12, 0.11, 0.10), strict=True))
    quality = [
        ("word_count", 50, 100_000),
        ("median_word_length", 3, 10),
        ("symbol_to_word_ratio", None, 0.1),
        ("fraction_of_words_with_alpha_character", 0.8, None),
        ("required_word_count", 2, None),
        ("fraction_of_lines_starting_with_bullet_point", None, 0.9),
        ("fraction_of_lines_ending_with_ellipsis", None, 0.3),
    ]
    repetition = [
        ("fraction_of_duplicate_lines", None, 0.3),
        ("fraction_of_characters_in_duplicate_lines", None, 0.3),
        *((f"fraction_of_characters_in_most_common_{n}grams", None, limit) for n, limit in grams.items()),
        *((f"fraction_of_characters_in_duplicate_{n}grams", None, limit) for n, limit in repeated.items()),
    ]
    texts = [text for text, _ in oracle]
    for stage, limits in ((QUALITY, quality), (REPETITION, repetition)):
        columns = {rule.reason: NAMES[rule.column.split(".")[1]] for rule in stage.rules()}
        expected = [
            next(
                (
                    name
                    for name, low, high in limits
                    if name in values and ((low and values[name] < low) or (high and values[name] > high))
                ),
                None,
            )
            for _, values in oracle
        ]
        assert [columns[reasons[0]] if reasons else None for reasons, _ in outcomes(stage, texts)] == expected
        assert None in expected
        assert len(set(expected)) > 4


def test_the_variant_brings_its_limits_and_a_given_one_wins() -> None:
    assert REPETITION.max_duplicate_line_chars == 0.3
    assert GopherRepetition().max_duplicate_line_chars == 0.2
    assert GopherRepetition(variant="dolma", max_duplicate_line_chars=0.2).max_duplicate_line_chars == 0.2
    assert GopherRepetition(variant="dolma", max_top_2_gram_chars=None).max_top_2_gram_chars is None
    assert QUALITY.min_median_word_chars == 3
    assert GopherQuality(variant="dolma", min_words=20, min_median_word_chars=2).min_words == 20
    for stage in (QUALITY, REPETITION, GopherQuality(), GopherRepetition()):
        assert type(stage)(**stage.model_dump(mode="json")) == stage  # the resolved recipe reads as it was


@pytest.mark.parametrize(
    ("stage", "given_", "message"),
    [
        (GopherQuality, {"variant": "dolma", "max_hashes": 0.1}, "`max_hashes` .* variant dolma does not measure"),
        (GopherQuality, {"max_symbol_words": 0.1}, "`max_symbol_words` .* variant datatrove does not measure"),
        (GopherRepetition, {"variant": "dolma", "max_duplicate_paragraphs": 0.3}, "`max_duplicate_paragraphs`"),
        (GopherQuality, {"variant": "dolma", "words": "unicode"}, "`words` is whitespace in the variant dolma"),
        (GopherRepetition, {"words": "whitespace"}, "`words` is english or unicode in the variant datatrove"),
        (GopherQuality, {"variant": "nemo"}, "'datatrove' or 'dolma'"),
    ],
)
def test_a_limit_of_the_other_variant_is_refused(stage, given_, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValidationError, match=message):
        stage(**given_)


def test_a_recipe_shows_the_limits_in_force(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        'name: r\nsources:\n  docs: {files: "*.jsonl"}\nstages:\n'
        "  - gopher_repetition: {variant: dolma, max_duplicate_lines: 0.4}\n  - gopher_quality: {variant: dolma}\n"
    )
    recipe = recipes.load(path)
    repetition, quality = (next(iter(entry.values())) for entry in recipe.dump()["stages"])
    assert (repetition["max_duplicate_lines"], repetition["max_duplicate_line_chars"]) == (0.4, 0.3)
    assert (quality["min_median_word_chars"], quality["max_hashes"], quality["words"]) == (3.0, None, "whitespace")
    schema = recipes.kept_schema(recipe, recipes.segments(recipe)[0])
    assert "gopher_quality.median_word_chars" in schema.names
    assert "gopher_quality.mean_word_chars" not in schema.names
    recipes.check(recipe, {"docs": ("text",)})
    path.write_text(path.read_text().replace("{variant: dolma}", "{variant: dolma, max_hashes: 0.2}"))
    with pytest.raises(recipes.SettingsError, match=r"r\.yaml:6: `stages.1.gopher_quality`: `max_hashes` limits"):
        recipes.load(path)


def test_another_variant_or_limit_is_another_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    path, keys = tmp_path / "r.yaml", set()
    chosen = ("{}", "{variant: dolma}", "{variant: dolma, max_duplicate_line_chars: 0.2}", "{variant: datatrove}")
    for settings_ in chosen:
        files = tmp_path / "*.jsonl"
        path.write_text(f'name: r\nsources: {{a: {{files: "{files}"}}}}\nstages: [gopher_repetition: {settings_}]\n')
        recipe = recipes.load(path)
        keys.add(make_plan(recipe, list_shards(recipe)).segments[0].shards)
    assert len(keys) == len(chosen) - 1  # datatrove is the default


def test_every_rule_has_a_measure_a_unit_and_a_source() -> None:
    for stage in (QUALITY, REPETITION):
        units = {m.column: m.unit for m in stage.measures}
        batch = pa.RecordBatch.from_pydict({"text": ["a"]})
        assert set(stage.measure(batch)) == set(stage.adds) == set(units)
        for rule in stage.rules():
            assert units[rule.column]
            assert rule.published.startswith("dolma")


def test_a_stop_word_list_is_a_setting() -> None:
    texts = pa.array(["der Hund und die Katze und x", "der"])
    found = dolma.measure(texts, ("und", "der", "", "x" * 70), repetition=False)
    assert found[:, dolma.STOP_WORDS].tolist() == [3, 1]
    assert np.array_equal(dolma.measure(texts, (), repetition=False)[:, dolma.STOP_WORDS], [0, 0])
