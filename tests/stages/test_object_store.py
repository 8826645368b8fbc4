"""Paths of an object store: moto's S3 over HTTP through s3fs; what is wrong is said in one message before any work."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import httpx
import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # importlib mode puts no folder of tests on the path
from store import serve_s3

from gristmill.stages.download import Policy, Wanted, fetch
from gristmill.stages.download_http import DownloadError
from gristmill.stages.download_listing import Download, choose
from gristmill.stages.shards import checksum, exists, publish, publish_bytes, read_bytes
from gristmill.stages.stores import (
    PatientFile,
    StoreError,
    StoreLost,
    check_writable,
    explained,
    local_copy,
    local_model,
    matching,
    passing,
)

DATA = bytes(range(256)) * 500


@pytest.fixture(scope="module")
def store() -> Iterator[fsspec.AbstractFileSystem]:
    with serve_s3("corpus") as fs:
        yield fs


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))


def test_files_appear_whole_or_not_at_all(store: fsspec.AbstractFileSystem) -> None:
    publish_bytes("s3://corpus/publish/a.bin", DATA)
    assert read_bytes("s3://corpus/publish/a.bin") == DATA
    assert exists("s3://corpus/publish/a.bin")

    def cut_short() -> None:
        with publish("s3://corpus/publish/b.bin") as file:
            file.write(DATA)
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        cut_short()
    assert [p.rsplit("/", 1)[-1] for p in store.find("corpus/publish")] == ["a.bin"]
    assert checksum("s3://corpus/publish/a.bin") == checksum_of(DATA)


def checksum_of(data: bytes) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def test_writing_makes_no_bucket(store: fsspec.AbstractFileSystem) -> None:
    with pytest.raises(FileNotFoundError):
        publish_bytes("s3://typo/run/a.bin", DATA)
    assert "typo" not in store.ls("")


def test_a_wrong_bucket_is_one_message() -> None:
    with pytest.raises(StoreError, match=r"s3://nowhere/run cannot be written: there is no bucket nowhere .*Create it"):
        check_writable("s3://nowhere/run")
    with pytest.raises(DownloadError, match=r"s3://nowhere/\*\.gz"):
        choose(Download(urls="s3://nowhere/*.gz"))


def test_a_missing_permission_is_one_message(store: fsspec.AbstractFileSystem) -> None:
    server = str(store.client_kwargs.get("endpoint_url") or store.s3.meta.endpoint_url)
    before = httpx.post(f"{server}/moto-api/reset-auth", content=b"0").json()["PREVIOUS_INITIAL_NO_AUTH_ACTION_COUNT"]
    try:
        with pytest.raises(StoreError, match=r"cannot be written: permission denied .*AWS_ACCESS_KEY_ID"):
            check_writable("s3://corpus/run")
        with (
            pytest.raises(StoreError, match=r"cannot be listed: permission denied"),
            explained("s3://corpus/publish/*.bin", "listed"),
        ):
            matching("s3://corpus/publish/*.bin")
    finally:
        httpx.post(f"{server}/moto-api/reset-auth", content=before.encode())
    check_writable("s3://corpus/run")
    assert store.find("corpus/run") == []


def test_no_credentials_are_one_message(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(StoreError, match=r"no credentials for s3://\. Credentials are looked for in AWS_ACCESS"):
            check_writable("s3://corpus/run")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_scheme_whose_package_is_missing() -> None:
    with pytest.raises(StoreError, match="Install gcsfs"), explained("gs://x/y", "read"):
        raise ImportError("no", name="gcsfs")


def test_a_local_copy_is_made_once_for_a_content(store: fsspec.AbstractFileSystem) -> None:
    store.pipe_file("corpus/models/m/model.json", b"one")
    store.pipe_file("corpus/models/m/deep/x.bin", DATA)
    first = Path(local_copy("s3://corpus/models/m"))
    assert (first / "model.json").read_bytes() == b"one"
    assert (first / "deep/x.bin").read_bytes() == DATA
    assert local_copy("s3://corpus/models/m/") == str(first)
    store.pipe_file("corpus/models/m/model.json", b"two")
    second = Path(local_copy("s3://corpus/models/m"))
    assert (second / "model.json").read_bytes() == b"two"
    assert (first / "model.json").read_bytes() == b"one", "a program may still have the old content mapped"
    assert local_copy("/a/local/path") == "/a/local/path"
    with pytest.raises((StoreError, FileNotFoundError)):
        local_copy("s3://corpus/models/none")


def test_a_model_of_a_store_is_loaded_from_a_copy(store: fsspec.AbstractFileSystem) -> None:
    from gristmill.stages.classifier import Classifier

    store.pipe_file("corpus/models/q/model.json", b"{}")
    stage = Classifier(model="s3://corpus/models/q", min_score=0.5)
    moved = local_model(stage)
    assert (Path(moved.model) / "model.json").read_bytes() == b"{}"
    assert moved.min_score == 0.5
    here = Classifier(model="a/folder")
    assert local_model(here) is here


def test_objects_are_downloaded(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    for i in range(3):
        store.pipe_file(f"corpus/in/{i}/x.jsonl", DATA[: i * 1_000])
    wanted = choose(Download(urls="s3://corpus/in/*/x.jsonl"))
    assert [w.name for w in wanted] == ["0/x.jsonl", "1/x.jsonl", "2/x.jsonl"]
    card = fetch(wanted[2], str(tmp_path), Policy())
    assert (tmp_path / "2/x.jsonl").read_bytes() == DATA[:2_000]
    assert card.etag == store.info("corpus/in/2/x.jsonl")["ETag"]
    there = fetch(wanted[1], "s3://corpus/copy", Policy())
    assert store.cat_file("corpus/copy/1/x.jsonl") == DATA[:1_000]
    assert there.verified == ("length",)
    assert fetch(wanted[1], "s3://corpus/copy", Policy()).found
    with pytest.raises(DownloadError, match=r"there is no bucket|No such|not exist"):
        fetch(Wanted("s3://corpus/in/9/x.jsonl", "x"), str(tmp_path), Policy())


class Flaky(io.BytesIO):
    """Fails on its first reads."""

    def __init__(self, failures: list[Exception]) -> None:
        super().__init__(DATA)
        self.failures = failures

    def read(self, size: int | None = -1) -> bytes:
        if self.failures:
            raise self.failures.pop()
        return super().read(size)


def test_reading_goes_on_after_errors_that_pass() -> None:
    failures: list[Exception] = [ConnectionResetError("reset"), TimeoutError("slow")]
    opened, waits = [], []

    def opening() -> io.BytesIO:
        opened.append(1)
        return Flaky(failures)

    with PatientFile("s3://x/y", opening, 4, waits.append) as file:
        file.seek(1_000)
        assert file.read(10) == DATA[1_000:1_010]
        assert file.read() == DATA[1_010:]
        assert file.read(5) == b""
    assert len(opened) == 3
    assert len(waits) == 2


def test_reading_is_given_up_in_a_way_that_no_reader_takes_for_damage() -> None:
    import zstandard

    failures: list[Exception] = [ConnectionResetError("reset")] * 9
    file = PatientFile("s3://x/y", lambda: Flaky(failures), 3, lambda _: None)
    with pytest.raises(StoreLost, match="s3://x/y: reading at byte 0 failed 3 times, the last with ConnectionResetErr"):
        file.read(5)
    packed = zstandard.compress(DATA)
    broken = [ConnectionResetError("reset")] * 99
    body = PatientFile("s3://x/y", lambda: Flaky(broken), 2, lambda _: None)
    body._size = len(packed)
    with pytest.raises(StoreLost):
        pa.CompressedInputStream(pa.PythonFile(body, "r"), "zstd").read(10)


def behind(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def client_error(status: int) -> Exception:
    import aiohttp

    return aiohttp.ClientResponseError(None, (), status=status)  # type: ignore[arg-type]


def boto_error(status: int) -> Exception:
    from botocore.exceptions import ClientError

    return ClientError({"ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (StoreLost(), True),
        (httpx.ReadError("x"), True),
        (FileNotFoundError(), False),
        (behind(FileNotFoundError(), client_error(503)), True),
        (behind(FileNotFoundError(), client_error(404)), False),
        (client_error(429), True),
        (boto_error(503), True),
        (boto_error(400), False),
        (PermissionError(), False),
        (StoreError("x"), False),
        (ValueError(), False),
        (None, False),
    ],
)
def test_which_errors_pass(error: Exception | None, passes: bool) -> None:
    assert passing(error) is passes
