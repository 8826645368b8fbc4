"""A whole run in an object store: moto's S3 over HTTP, reached through s3fs. The same bytes as on a disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # importlib mode puts no folder of tests on the path
from store import serve_s3

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.downloads import InputError
from gristmill.pipelines.main_job import main_job
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import RecipeError
from gristmill.pipelines.run import Options, Outcome, run
from gristmill.pipelines.status import status
from gristmill.pipelines.verify import verify
from gristmill.stages.stores import StoreError
from gristmill.tokenize.shards import TokenSet

KINDS = ("kept", "dropped", "cluster", "sign")


@pytest.fixture(scope="module")
def store() -> Iterator[fsspec.AbstractFileSystem]:
    with serve_s3("corpus") as fs:
        yield fs


def do(recipe: Path, out: str) -> Outcome:
    with Display() as display:
        return run(recipes.load(recipe), out, Options(debug=True), display)


def test_a_run_in_a_store_gives_the_bytes_of_a_run_on_a_disk(
    store: fsspec.AbstractFileSystem,
    crawl: Path,
    recipe_text: str,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    store.put(f"{crawl}/", "corpus/crawl/", recursive=True)
    recipe = tmp_path / "small.yaml"
    recipe.write_text(recipe_text.replace(str(crawl), "s3://corpus/crawl"), "utf-8")
    out = "s3://corpus/runs/small"
    main_job(str(recipe), out, Options(debug=True), as_json=False, ablation=False)
    assert b"gopher_quality" in store.cat_file("corpus/runs/small/report.html")

    def wanted(name: str) -> bool:
        top, _, rest = name.partition("/")
        return (rest.split("/")[0] in KINDS and not name.endswith(".json")) or (
            top in ("models", "tokens") and name.endswith((".arpa", ".npy", ".bin", ".idx", "tokenizer.json"))
        )

    disk = {p.relative_to(finished_run).as_posix(): p.read_bytes() for p in finished_run.rglob("*") if p.is_file()}
    disk = {name: data for name, data in disk.items() if wanted(name)}
    there = {path.removeprefix("corpus/runs/small/"): path for path in store.find("corpus/runs/small")}
    assert {name for name in there if wanted(name)} == set(disk)
    assert len(disk) > 50
    assert [name for name, data in disk.items() if store.cat_file(there[name]) != data] == []
    assert not [name for name in there if name.rsplit("/", 1)[-1].startswith(".")], "temporary files are left"
    assert do(recipe, out).done == 0
    run_there = open_run(out)
    assert verify(run_there) == []
    assert all(row.done == row.shards for row in status(run_there))
    tokens = TokenSet.open(f"{out}/tokens")
    assert tokens.sources["docs"].tokens == TokenSet.open(finished_run / "tokens").sources["docs"].tokens


def test_an_ablation_in_a_store_is_refused_before_any_work(
    store: fsspec.AbstractFileSystem, recipe_text: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(recipe_text + "ablation: {file: a.yaml}\n", "utf-8")
    with pytest.raises(
        RecipeError, match=r"trains in a local folder, and this run lies at s3://corpus/x\. Pass --no-ab"
    ):
        main_job(str(recipe), "s3://corpus/x", Options(debug=True), as_json=False, ablation=True)
    assert store.find("corpus/x") == []


def test_a_run_in_a_bucket_that_there_is_not_is_refused_before_any_work(
    store: fsspec.AbstractFileSystem, recipe_text: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(recipe_text, "utf-8")
    with pytest.raises(StoreError, match="there is no bucket nowhere"):
        do(recipe, "s3://nowhere/run")
    recipe.write_text(
        recipe_text.replace("sources:\n", "sources:\n  more: {files: 's3://nowhere/*.parquet'}\n"), "utf-8"
    )
    with pytest.raises((StoreError, InputError), match=r"s3://nowhere/\*\.parquet"):
        do(recipe, str(tmp_path / "run"))
    assert not list(tmp_path.glob("run/*/kept"))
