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
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, Outcome, run
from gristmill.pipelines.status import status
from gristmill.pipelines.verify import verify
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
    outcome = do(recipe, out)
    assert outcome.found == 0

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
