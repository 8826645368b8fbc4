"""Variants of a recipe: what is changed, what is refused, and that pieces they share are done once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.borrow import borrow
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, Outcome, run
from gristmill.pipelines.variants import variants_of
from gristmill.pipelines.verify import verify
from gristmill.stages.settings_file import SettingsError

Make = Callable[..., Path]


def do(recipe: recipes.Recipe, out: Path) -> Outcome:
    with Display() as display:
        return run(recipe, str(out), Options(debug=True), display)


def results(out: Path) -> dict[str, bytes]:
    kinds = ("[0-9]*/kept/*", "[0-9]*/dropped/*", "[0-9]*/cluster/*.parquet", "tokens/*.bin", "tokens/*.idx")
    files = [p for kind in kinds for p in out.glob(kind)]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in [*files, out / "tokens/shards.json"]}


def test_paths_lead_into_the_recipe(recipe_file: Make, tmp_path: Path) -> None:
    vary = {
        "no_minhash": {"stages.minhash": False},
        "long": {"stages.gopher_quality.min_words": 80},
        "plain": {"stages.pii.emails": False, "stages.exact": {"scope": "source"}},
        "wide": {"tokenizer.vocab_size": 500},
        "prose": {"models.prose.kenlm.order": 3},
    }
    control, no_minhash, long, plain, wide, prose = variants_of(recipe_file(), vary, str(tmp_path / "out"))
    names = [use.key for use in control.recipe.uses]
    assert [use.key for use in no_minhash.recipe.uses] == [name for name in names if name != "minhash"]
    quality = next(use for use in long.recipe.uses if use.key == "gopher_quality")
    assert (quality.stage.min_words, quality.stage.min_alphabetic_words, quality.only) == (80, 0.3, ("docs", "readmes"))
    stages = {use.key: use.stage for use in plain.recipe.uses}
    assert (stages["pii"].emails, stages["exact"].scope) == (False, "source")
    assert wide.recipe.tokenizer.vocab_size == 500
    assert prose.recipe.models["prose"].settings.order == 3
    assert control.recipe == recipes.load(recipe_file())  # the file itself is as it was


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages.c4": False}, "variant x: `stages.c4`: the recipe has no stage `c4`. It has extract, language"),
        ({"stages.gopher_qality": False}, "Did you mean `gopher_quality`?"),
        ({"stages.gopher_quality.min_wrods": 3}, "variant x: .*Did you mean `min_words`?"),
        ({"stages": {}}, "name a stage, for example `stages.c4: false`"),
        ({"stages.pii": 3}, "false leaves the stage out, a mapping replaces its settings; 3 is neither"),
        ({"name.first": 3}, "`name.first`: `name` is 'small' in the recipe, nothing that has settings"),
        ({"tokeniser.vocab_size": 3}, "variant x: .*Did you mean `tokenizer`?"),
        ({"stages.minhash.ngram": 5}, "variant x comes to the same recipe as control"),
    ],
)
def test_what_leads_nowhere_is_refused(recipe_file: Make, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        variants_of(recipe_file(), {"x": changes}, str(tmp_path))


def test_downloads_are_in_one_place(recipe_file: Make, tmp_path: Path, crawl: Path) -> None:
    path = recipe_file(
        replace={f'files: "{crawl}/code/*.parquet"': "download: {urls: ['https://x.example/a.parquet']}"}
    )
    variants = variants_of(path, {"x": {"stages.pii": False}}, str(tmp_path / "out"))
    assert {v.recipe.sources["code"].download.to for v in variants} == {str(tmp_path / "out/download/code")}


@pytest.mark.end_to_end
def test_what_variants_share_is_done_once(finished_run: Path, recipe_file: Make, tmp_path: Path) -> None:
    """The bytes are those of a run of its own, and the lender's files stay as they were."""
    vary = {
        "no_minhash": {"stages.minhash": False},
        "wide": {"tokenizer.vocab_size": 500},
        "long": {"stages.gopher_quality.min_words": 80},
    }
    control, *variants = variants_of(recipe_file(), vary, str(tmp_path))
    lender = tmp_path / "control"
    shutil.copytree(finished_run, lender)
    assert do(control.recipe, lender).done == 0
    before = results(lender)
    fresh = {}
    for variant in variants:
        own, borrowed = tmp_path / f"own-{variant.name}", tmp_path / variant.name
        alone = do(variant.recipe, own)
        borrow(variant.recipe, str(borrowed), [(control.recipe, str(lender))])
        shared = do(variant.recipe, borrowed)
        fresh[variant.name] = shared.done
        assert shared.done < alone.done
        assert results(borrowed) == results(own)
        assert verify(open_run(borrowed)) == []
        assert do(variant.recipe, borrowed).done == 0
        assert not list(tmp_path.rglob("*.borrowed.tmp"))
    assert results(lender) == before
    assert verify(open_run(lender)) == []
    # With another vocabulary only tokens are made; the others begin anew at the stage that changed.
    assert fresh["wide"] < fresh["no_minhash"] < fresh["long"]
    assert borrow(variants[0].recipe, str(tmp_path / "no_minhash"), [(control.recipe, str(lender))]) == 0
