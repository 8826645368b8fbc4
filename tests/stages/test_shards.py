"""Files appear whole or not at all, on a disk and in a store."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from gristmill.stages.shards import (
    checksum,
    exists,
    filesystem,
    join,
    publish,
    publish_bytes,
    read_bytes,
    remove_leftovers,
)


@pytest.mark.parametrize("base", ["disk", "memory://bucket"])
def test_round_trip(base: str, tmp_path: Path) -> None:
    folder = str(tmp_path) if base == "disk" else base
    path = join(folder, "a", "b.bin")
    publish_bytes(path, b"one")
    publish_bytes(path, b"two")
    assert read_bytes(path) == b"two"
    assert exists(path)
    assert checksum(path) == checksum(path)
    fs, inner = fsspec.core.url_to_fs(folder)
    assert [name.rsplit("/", 1)[-1] for name in fs.find(inner)] == ["b.bin"]


@pytest.mark.parametrize(
    "path", ["/a/b/", "a/b", "./x", "~/x", "/a//b", "/", ".", "/a/../b", "file:///a/b", "local://a"]
)
def test_a_plain_path_is_what_fsspec_takes_it_for(path: str) -> None:
    ours, expected = filesystem(path), fsspec.core.url_to_fs(path)
    assert (type(ours[0]), ours[1]) == (type(expected[0]), expected[1])


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    publish_bytes(path, b"old")

    def fail() -> None:
        with publish(path) as file:
            file.write(b"half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert read_bytes(path) == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_nobody_sees_a_half_written_file(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    with publish(path) as file:
        file.write(b"half")
        assert not exists(path)
    assert read_bytes(path) == b"half"


def test_leftovers_of_killed_attempts_are_removed(tmp_path: Path) -> None:
    (tmp_path / "seg").mkdir()
    (tmp_path / "seg" / ".part-00000.parquet.abc.tmp").write_bytes(b"half")
    (tmp_path / "seg" / "part-00000.parquet").write_bytes(b"whole")
    assert remove_leftovers(str(tmp_path)) == 1
    assert [p.name for p in (tmp_path / "seg").iterdir()] == ["part-00000.parquet"]
    assert remove_leftovers(str(tmp_path / "none")) == 0
