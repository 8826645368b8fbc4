"""Recipes: what they say, and how a faulty one is refused before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.listing import InputError, frozen, list_shards
from gristmill.pipelines.plan import make_plan
from gristmill.pipelines.recipe import RecipeError, check, load, segments
from gristmill.stages.settings_file import SettingsError

Make = Callable[..., Path]
RECIPES = Path(recipes.__file__).parent / "recipes"
FORMATS = {"docs": ("html",), "readmes": ("text",), "code": ("text",)}


def test_segments_begin_where_shards_wait(recipe_file: Make) -> None:
    found = segments(load(recipe_file()))
    assert [s.folder for s in found] == ["01-extract", "02-perplexity", "03-exact", "04-minhash"]
    assert [s.models for s in found] == [(), ("prose", "quality"), (), ()]
    assert [use.key for use in found[3].uses] == ["minhash", "pii"]
    assert [s.gate.key if s.gate else None for s in found] == [None, None, "exact", "minhash"]


def test_a_first_global_stage_reads_the_input_itself(recipe_file: Make) -> None:
    recipe = load(recipe_file(replace={"  - extract: {min_chars: 100}\n    only: [docs]\n": "  - exact\n"}))
    assert next(s.folder for s in segments(recipe)) == "01-exact"


def test_resolved_recipe_reads_as_itself(recipe_file: Make, tmp_path: Path) -> None:
    recipe = load(recipe_file())
    again = tmp_path / "resolved.yaml"
    from ruamel.yaml import YAML

    with again.open("w") as file:
        YAML(typ="safe").dump(recipe.dump(), file)
    assert load(again).dump() == recipe.dump()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: small", "name: small\ncolour: red", r":3: unknown key `colour`"),
        ("  - exact\n", "  - exakt\n", r":\d+: no stage `exakt`. Did you mean `exact`\?"),
        ("{min_chars: 100}", "{min_char: 100}", r"unknown key `stages.0.extract.min_char`. Did you mean `min_chars`\?"),
        ("only: [docs]", "only: [doc]", r"no source `doc`. Did you mean `docs`\?"),
        ("kenlm:", "kenln:", r"no kind of model `kenln`. Did you mean `kenlm`\?"),
        ("vocab_size: 400", "vocab_size: many", r"`tokenizer.vocab_size`: Input should be a valid integer"),
        ("name: small", "name: [small", r"not valid YAML"),
        ("  - exact\n", "  - {exact: {}, pii: {}}\n", r"one stage an entry; this one has 2"),
        ("only: [docs]", "only: [7]", r":\d+: `stages\.0\.only\.0`: Input should be a valid string\."),
        ("only: [docs]", "only: 7", r":\d+: `stages\.0\.only`: Input should be a valid tuple\."),
        ("name: small", "name: small\nname: large", r":3: the key `name` is given twice"),
        (
            "name: small",
            "base: smal.yaml\nname: small",
            r":2: there is no base .*smal\.yaml\. Did you mean .*small\.yaml",
        ),
    ],
)
def test_a_fault_is_named_with_its_line(recipe_file: Make, old: str, new: str, message: str) -> None:
    path = recipe_file(replace={old: new})
    with pytest.raises(SettingsError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_models_are_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("name: r\nsources: {docs: {files: x}}\nmodels: [prose]\n", "utf-8")
    with pytest.raises(RecipeError, match=r"r\.yaml:3: `models` is a mapping from a name to a model\."):
        load(path)


def test_a_recipe_takes_over_what_it_does_not_say_from_its_base(recipe_file: Make) -> None:
    base = recipe_file()
    path = base.with_name("more.yaml")
    path.write_text("base: small.yaml\nname: more\nstages: [exact]\n", "utf-8")
    assert load(path).dump() == {**load(base).dump(), "name": "more", "stages": load(path).dump()["stages"]}
    assert [use.key for use in load(path).uses] == ["exact"]


def test_a_fault_in_a_base_is_named_there(recipe_file: Make) -> None:
    base = recipe_file(replace={"  - exact\n": "  - exakt\n"})
    line = base.read_text("utf-8").splitlines().index("  - exakt") + 1
    path = base.with_name("more.yaml")
    path.write_text("base: small.yaml\nname: more\n", "utf-8")
    with pytest.raises(SettingsError, match=rf"small\.yaml:{line}: no stage `exakt`"):
        load(path)
    path.write_text("base: small.yaml\nname: more\nstages:\n  - exact: {fiels: 1}\n", "utf-8")
    with pytest.raises(SettingsError, match=r"more\.yaml:4: unknown key `stages\.0\.exact\.fiels`"):
        load(path)


def test_a_missing_recipe_suggests_the_nearest(recipe_file: Make) -> None:
    path = recipe_file()
    with pytest.raises(SettingsError, match=r"no such file. Did you mean .*small\.yaml"):
        load(path.with_name("smal.yaml"))


def test_a_stage_out_of_order_is_refused(recipe_file: Make) -> None:
    path = recipe_file(replace={"  - extract: {min_chars: 100}\n    only: [docs]\n": ""})
    with pytest.raises(RecipeError, match=r"needs the column `text`.*`docs`.*`extract` gives it"):
        check(load(path), FORMATS)


def test_extract_on_text_says_to_restrict_it(recipe_file: Make) -> None:
    path = recipe_file(replace={"  - extract: {min_chars: 100}\n    only: [docs]\n": "  - extract: {min_chars: 100}\n"})
    with pytest.raises(RecipeError, match=r"needs the column `html`.*`readmes`.*only: \[...\]"):
        check(load(path), FORMATS)


def test_every_stage_declares_what_the_runner_asks() -> None:
    for key, stage in recipes.STAGES.items():
        assert stage.name == key
        assert isinstance(stage.version, int)
        assert isinstance(stage.needs, tuple)
        assert dict(stage.adds) is not None
        assert stage.__doc__
        own = [name for name in stage.adds if "." in name]
        assert all(name.split(".")[0] == key for name in own), own


def test_listing_is_frozen_and_a_change_is_refused(recipe_file: Make, tmp_path: Path, crawl: Path) -> None:
    copy = tmp_path / "in"
    copy.mkdir()
    for i, path in enumerate(sorted((crawl / "readmes").iterdir())):
        (copy / f"{i}.jsonl.zst").write_bytes(path.read_bytes())
    path = tmp_path / "r.yaml"
    path.write_text(f'name: r\nsources:\n  readmes: {{files: "{copy}/*"}}\n')
    recipe, out = load(path), str(tmp_path / "out")
    before = frozen(recipe, out)
    assert [s.name for s in before] == ["0.jsonl.zst", "1.jsonl.zst"]
    assert frozen(recipe, out) == before
    (copy / "2.jsonl.zst").write_bytes((copy / "1.jsonl.zst").read_bytes())
    with pytest.raises(InputError, match=r"1 new: .*2\.jsonl\.zst"):
        frozen(recipe, out)
    assert len(frozen(recipe, out, refresh=True)) == 3
    (copy / "0.jsonl.zst").unlink()
    with pytest.raises(InputError, match=r"1 gone"):
        frozen(recipe, out)


def test_a_pattern_without_files_is_refused(recipe_file: Make) -> None:
    path = recipe_file(replace={"/docs/*.warc.gz": "/docs/*.warc.zst"})
    with pytest.raises(InputError, match=r"Source `docs`: no file matches"):
        list_shards(load(path))


def test_keys_change_with_what_they_depend_on_and_nothing_else(recipe_file: Make) -> None:
    base = load(recipe_file("a.yaml"))
    shards = list_shards(base)
    plan = make_plan(base, shards)
    assert plan == make_plan(load(recipe_file("b.yaml")), shards)

    changed = make_plan(load(recipe_file("c.yaml", replace={"max_perplexity: 100000": "max_perplexity: 9000"})), shards)
    assert changed.segments[0].shards == plan.segments[0].shards
    assert changed.segments[1].models == plan.segments[1].models
    for shard, old, new in zip(shards, plan.segments[1].shards, changed.segments[1].shards, strict=True):
        assert (old == new) == (shard.source == "code")  # `code` does not pass the stage that changed
    assert changed.segments[2].cluster != plan.segments[2].cluster
    assert changed.tokenizer != plan.tokenizer

    later = make_plan(load(recipe_file("d.yaml", replace={"holdout_share: 0.1": "holdout_share: 0.2"})), shards)
    assert later.segments == plan.segments
    assert later.tokenizer != plan.tokenizer  # it does not learn from what is held out
    assert later.tokens != plan.tokens


@pytest.mark.parametrize("name", ["demo", "languages"])
def test_the_recipes_that_come_along_are_sound(name: str) -> None:
    recipe = load(RECIPES / f"{name}.yaml")
    check(recipe, {source: FORMATS.get(source, ("text",)) for source in recipe.sources})
    assert all(use.stage.model in recipe.models for use in recipe.uses if hasattr(use.stage, "max_perplexity"))
