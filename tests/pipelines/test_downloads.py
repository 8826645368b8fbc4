"""Downloads of a recipe and of the command: fetched once, frozen, read from the disk or straight from the store."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # importlib mode puts no folder of tests on the path
from web import Site, serve

from gristmill.pipelines import cli, downloads
from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.downloads import InputError, Job, downloaded, fetch_job, missing, progress_text
from gristmill.pipelines.engine import InProcess, OnDask
from gristmill.pipelines.main_job import dry_run
from gristmill.pipelines.progress import Display, Phase
from gristmill.pipelines.run import Options, Outcome, run
from gristmill.stages.download_http import DownloadError
from gristmill.stages.download_listing import Download
from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers import detect_format, read_batches
from gristmill.stages.settings_file import SettingsError
from gristmill.stages.shards import Shard, ShardError

RECIPE = """
name: fetched
sources:
  readmes: {{download: {{urls: [{address}/r/part-0.jsonl.zst, {address}/r/part-1.jsonl.zst], stream: {stream}}}}}
stages:
  - gopher_quality: {{min_words: 30}}
"""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, crawl: Path) -> Iterator[Site]:
    with serve(monkeypatch) as made:
        made.files = {f"/r/{p.name}": p.read_bytes() for p in (crawl / "readmes").iterdir()}
        yield made


def write(folder: Path, site: Site, *, stream: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fetched.yaml"
    path.write_text(RECIPE.format(address=site.address, stream=str(stream).lower()), "utf-8")
    return path


def do(recipe: Path, out: Path) -> Outcome:
    with Display() as display:
        return run(recipes.load(recipe), str(out), Options(debug=True), display)


def kept(out: Path) -> list[bytes]:
    return [p.read_bytes() for p in sorted(out.glob("*/kept/*.parquet"))]


def test_a_run_fetches_what_it_needs_once(site: Site, tmp_path: Path, crawl: Path) -> None:
    recipe = write(tmp_path, site)
    assert "2 files to download" in dry_run(str(recipe), str(tmp_path / "run"), Options(), as_json=False)
    assert missing(recipes.load(recipe), str(tmp_path / "run")) == {"readmes": 2}
    assert do(recipe, tmp_path / "run").done == 2
    asked = len(site.requests)
    assert asked == 2
    again = do(recipe, tmp_path / "run")
    assert (again.done, again.found) == (0, 2)
    assert len(site.requests) == asked
    folder = tmp_path / "run/download/readmes"
    manifest = orjson.loads((folder / "_download.json").read_bytes())
    assert [f["name"].rsplit("/", 1)[-1] for f in manifest["files"]] == ["part-0.jsonl.zst", "part-1.jsonl.zst"]
    assert {"url", "size", "etag", "xxh3", "verified"} <= set(manifest["files"][0])
    assert "0 pieces to do, 2 there" in dry_run(str(recipe), str(tmp_path / "run"), Options(), as_json=False)
    local = recipe.with_name("local.yaml")
    local.write_text(
        f"name: local\nsources:\n  readmes: {{files: '{folder}'}}\nstages:\n  - gopher_quality: {{min_words: 30}}\n"
    )
    assert do(local, tmp_path / "local").done == 2, "the folder as plain files: neither cards nor manifest are read"
    assert kept(tmp_path / "local") == kept(tmp_path / "run")


def test_streaming_keeps_no_copy_and_gives_the_same(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(write(tmp_path, site), tmp_path / "run")
    recipe = write(tmp_path / "s", site, stream=True)
    monkeypatch.setattr("time.sleep", lambda _: None)
    site.head_faults = ["503", "403"]
    assert do(recipe, tmp_path / "stream").done == 2
    assert kept(tmp_path / "stream") == kept(tmp_path / "run") != []
    assert not list((tmp_path / "stream").rglob("*.zst"))
    assert do(recipe, tmp_path / "stream").done == 0
    site.etag = '"two"'
    with pytest.raises(InputError, match="2 changed"):
        do(recipe, tmp_path / "stream")


@pytest.mark.parametrize("path", ["docs/part-0.warc.gz", "readmes/part-0.jsonl.zst", "code/part-0.parquet"])
@pytest.mark.parametrize("faults", [["503", "truncated"], ["reset", "500", "truncated"]])
def test_a_stream_that_breaks_is_read_on(
    site: Site, crawl: Path, path: str, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    site.files["/" + path] = (crawl / path).read_bytes()

    def read(place: str, etag: str) -> tuple[list[object], StageLedger]:
        account, problems = StageLedger(stage="read"), []
        kind = detect_format(path)
        shard = Shard(index=0, source="s", path=place, name=path, format=kind, size=1, stamp=etag)
        rows = [row for batch in read_batches(shard, account, problems) for row in batch.to_pylist()]
        assert problems == []
        return rows, account

    expected, books = read(str(crawl / path), "")
    site.faults = list(faults)
    got, streamed = read(f"{site.address}/{path}", site.etag or "")
    assert site.faults == []
    assert got == expected
    assert (streamed.read, streamed.kept) == (books.read, books.kept)
    with pytest.raises(ShardError, match="was changed since the inputs were listed"):
        read(f"{site.address}/{path}", '"other"')


def test_a_file_that_is_lost_is_fetched_again_alone(site: Site, tmp_path: Path) -> None:
    recipe = write(tmp_path, site)
    do(recipe, tmp_path / "run")
    lost = next((tmp_path / "run/download").rglob("part-1.jsonl.zst"))
    state = lost.stat()
    lost.unlink()
    with pytest.raises(InputError, match="1 of 2 files are not downloaded"):
        downloaded("readmes", recipes.load(recipe).sources["readmes"].download, str(tmp_path / "run"))
    import os

    before = len(site.requests)
    with Display() as display:
        downloads.fetch_sources(recipes.load(recipe), str(tmp_path / "run"), display)
    assert len(site.requests) == before + 1
    os.utime(lost, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert do(recipe, tmp_path / "run").done == 0


def test_those_that_fail_are_listed_and_the_others_are_there(site: Site, tmp_path: Path) -> None:
    settings = Download(urls=[f"{site.address}/r/part-0.jsonl.zst", f"{site.address}/r/none"])
    job = Job("x", settings, str(tmp_path))
    wanted = downloads.chosen(settings, str(tmp_path))
    with (
        Display() as display,
        pytest.raises(DownloadError, match=r"1 of 2 files were not fetched.*\n.*/r/none: HTTP 404"),
    ):
        fetch_job(job, wanted, display)
    assert next(tmp_path.rglob("part-0.jsonl.zst")).read_bytes() == site.files["/r/part-0.jsonl.zst"]


def test_who_stops_keeps_what_has_come(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files, site.faults = {"/big": bytes(10_000_000)}, ["trickle"]
    settings = Download(urls=f"{site.address}/big")
    wanted = downloads.chosen(settings, str(tmp_path))
    calls = []

    def to(_self: Phase, *_arguments: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Phase, "to", to)
    with Display() as display, pytest.raises(KeyboardInterrupt):
        fetch_job(Job("x", settings, str(tmp_path)), wanted, display)
    part = next(tmp_path.rglob("*.part"))
    assert 0 < part.stat().st_size < 10_000_000


def test_the_choice_is_frozen_until_it_is_asked_anew(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("{}")
    settings = Download(urls=f"{tmp_path}/in/*")
    assert len(downloads.chosen(settings, str(tmp_path / "out"))) == 1
    (tmp_path / "in/b.jsonl").write_text("{}")
    assert len(downloads.chosen(settings, str(tmp_path / "out"))) == 1
    assert len(downloads.chosen(settings, str(tmp_path / "out"), refresh=True)) == 2
    assert len(downloads.chosen(settings.model_copy(update={"files": 1}), str(tmp_path / "out"))) == 1


@pytest.mark.parametrize("kind", ["in process", "dask"])
def test_files_are_pieces_of_work_of_an_engine(site: Site, tmp_path: Path, kind: str) -> None:
    settings = Download(urls=[f"{site.address}{path}" for path in site.files])
    wanted = downloads.chosen(settings, str(tmp_path))
    with Display() as display:
        if kind == "dask":
            from distributed import Client

            with Client(n_workers=1, threads_per_worker=2, processes=False, dashboard_address="127.0.0.1:0") as client:
                cards = downloads.download(settings, wanted, str(tmp_path), display, "x", OnDask(client))
        else:
            cards = downloads.download(settings, wanted, str(tmp_path), display, "x", InProcess())
    assert [(tmp_path / c.name).read_bytes() for c in cards] == list(site.files.values())


def test_the_command_fetches_a_sample_of_a_crawl(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gzip

    names = [f"crawl-data/CC-MAIN-2024-10/segments/1/wet/x-{i:02d}.warc.wet.gz" for i in range(20)]
    site.files["/crawl-data/CC-MAIN-2024-10/wet.paths.gz"] = gzip.compress("\n".join(names).encode())
    site.files |= {f"/{name}": name.encode() for name in names}
    arguments = ["download", "--crawl", "CC-MAIN-2024-10", "--kind", "wet", "--files", "5", "--seed", "1"]
    arguments += ["--base-url", site.address, "--out", str(tmp_path / "out"), "--json"]
    assert command(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {k: result[k] for k in ("files", "found", "unverified")} == {"files": 5, "found": 0, "unverified": 0}
    there = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.wet.gz"))
    assert len(there) == 5
    assert (tmp_path / "out" / there[0]).read_text() == f"crawl-data/{there[0]}"
    assert command(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["found"] == 5
    assert command([*arguments[:-1], "--dry-run"]) == 0
    assert sorted(capsys.readouterr().out.split()) == [f"{site.address}/crawl-data/{name}" for name in there]


def test_the_command_takes_a_recipe_or_the_keys_of_a_download(site: Site, tmp_path: Path) -> None:
    recipe = write(tmp_path, site)
    assert command(["download", str(recipe), "--out", str(tmp_path / "run")]) == 0
    asked = len(site.requests)
    assert do(recipe, tmp_path / "run").done == 2
    assert len(site.requests) == asked
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"urls: {site.address}/r/part-0.jsonl.zst\nto: {tmp_path}/alone\n")
    assert command(["download", str(spec)]) == 0
    assert next((tmp_path / "alone").rglob("part-0.jsonl.zst")).is_file()


@pytest.mark.end_to_end
def test_the_command_fetches_from_the_workers_of_a_cluster_file(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, cluster = tmp_path / "spec.yaml", tmp_path / "cluster.yaml"
    spec.write_text(f"urls: {site.address}/r/part-0.jsonl.zst\nto: {tmp_path}/alone\n")
    local = "{n_workers: 1, threads_per_worker: 1, host: 127.0.0.1, dashboard_address: '127.0.0.1:0'}"
    cluster.write_text(f"class: dask.distributed.LocalCluster\narguments: {local}\n")
    assert command(["download", str(spec), "--cluster", str(cluster)]) == 0
    assert next((tmp_path / "alone").rglob("part-0.jsonl.zst")).is_file()
    capsys.readouterr()
    assert command(["download", str(spec), "--cluster", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def command(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def test_what_is_asked_wrongly_is_said(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["download"]) == 2
    assert "exactly one of `crawl`, `urls` and `url_list`" in capsys.readouterr().err
    assert command(["download", "--url", f"{site.address}/x"]) == 2
    assert "--out FOLDER" in capsys.readouterr().err
    assert command(["download", "--url", f"{site.address}/x", "--out", str(tmp_path)]) == 1
    assert "HTTP 404" in capsys.readouterr().err
    recipe = write(tmp_path, site)
    assert command(["download", str(recipe), "--files", "3"]) == 2
    assert "leave out files" in capsys.readouterr().err
    recipe.write_text(recipe.read_text().replace("stream: false", "steam: false"))
    with pytest.raises(SettingsError, match=r"fetched\.yaml:4: .*`stream`"):
        recipes.load(recipe)
    recipe.write_text("name: x\nsources:\n  a: {dump: b}\n")
    with pytest.raises(SettingsError, match="`files`, or a `download`"):
        recipes.load(recipe)


def test_progress_says_the_rate_and_the_time_left() -> None:
    assert progress_text(0, 1.0, 0, 0, 10) == "0.0 MB/s"
    # 30 MB in 10 s, two files of 10 MB done, 20 wanted: 200 MB in all, 170 left at 3 MB/s
    assert progress_text(30_000_000, 10.0, 20_000_000, 2, 20) == "3.0 MB/s  0:00:56 left"
