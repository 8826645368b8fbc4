"""Sources of a recipe: which shards a listing makes of them, mapped columns, and files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.funnel import funnel
from gristmill.pipelines.listing import InputError, list_shards
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.plan import make_plan
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import Recipe
from gristmill.pipelines.run import Options, RunError, run
from gristmill.pipelines.verify import verify
from gristmill.stages.settings_file import SettingsError
from gristmill.stages.shards import Shard


def load(folder: Path, text: str) -> Recipe:
    (folder / "recipe.yaml").write_text(f"name: x\n{text}")
    return recipes.load(folder / "recipe.yaml")


def shards(folder: Path, text: str) -> list[Shard]:
    return list_shards(load(folder, text))


def do(folder: Path, text: str, out: str = "run") -> Path:
    with Display() as display:
        run(load(folder, text), str(folder / out), Options(debug=True), display)
    return folder / out


def texts(out: Path) -> list[str]:
    return [str(text) for text in open_run(out).kept().to_table(columns=["text"])["text"].to_pylist()]


def test_text_files_are_bundled(tmp_path: Path) -> None:
    names = ["src/a.py", "src/deep/b ü.py", "src/c.py", "src/d.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"code of {name}")
    (tmp_path / "src/.hidden").write_text("x")
    source = f"sources: {{code: {{files: {tmp_path}/src, format: text}}}}\n"
    one = shards(tmp_path, source)
    assert [m.name for s in one for m in s.members] == ["a.py", "c.py", "d.py", "deep/b ü.py"]
    assert len(one) == 1
    assert [len(s.members) for s in shards(tmp_path, source + "shard_bytes: 35\n")] == [2, 1, 1]
    out = do(tmp_path, source)
    assert sorted(texts(out)) == sorted(f"code of {name}" for name in names)
    assert verify(open_run(out)) == []
    (tmp_path / "src/c.py").write_text("another")
    with pytest.raises(InputError, match=r"1 changed: .*src/c\.py"):
        do(tmp_path, source)


def test_the_key_of_a_bundle_does_not_depend_on_where_it_lies(tmp_path: Path) -> None:
    keys = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text("a")
        recipe = load(tmp_path, f"sources: {{s: {{files: {tmp_path}/{place}}}}}\n")
        listed = [
            s.model_copy(update={"members": tuple(m.model_copy(update={"stamp": ""}) for m in s.members)})
            for s in list_shards(recipe)
        ]
        keys.append(make_plan(recipe, listed).segments[0].shards)
    assert keys[0] == keys[1]


def test_big_jsonl_is_cut_between_frames(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {i}", "id": str(i)}) + "\n" for i in range(200)]
    framed = b"".join(zstandard.compress("".join(lines[i : i + 7]).encode()) for i in range(0, 200, 7))
    (tmp_path / "a.jsonl.zst").write_bytes(framed)
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress("".join(lines).encode()))
    (tmp_path / "c.jsonl").write_text("".join(lines))
    source = f"sources: {{s: {{files: '{tmp_path}/*.jsonl*'}}}}\nshard_bytes: 400\n"
    listed = shards(tmp_path, source)
    of = {name: [s for s in listed if s.name == name] for name in ("a.jsonl.zst", "b.jsonl.zst", "c.jsonl")}
    assert {name: len(found) for name, found in of.items()} == {"a.jsonl.zst": 6, "b.jsonl.zst": 1, "c.jsonl": 17}
    assert [(s.index, s.start) for s in of["c.jsonl"][:2]] == [(7, 0), (8, 400)]
    assert of["a.jsonl.zst"][-1].label.endswith(":]")
    assert texts(do(tmp_path, source)) == [f"text {i}" for i in range(200)] * 3


def test_columns_are_mapped(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["a"], "link": ["http://x"], "key": ["k"]}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("content,link,key\nb,http://y,l\n")
    source = "sources: {{s: {{files: '{}/*.[pc]*', columns: {{text: content, url: link, doc_id: key}}}}}}\n"
    out = do(tmp_path, source.format(tmp_path))
    rows = open_run(out).kept().to_table(columns=["doc_id", "url", "text", "metadata"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [("k", "http://x", "a", None), ("l", "http://y", "b", None)]
    with pytest.raises(SettingsError, match=r"`columns` has no `txt`.*`text`"):
        load(tmp_path, "sources: {s: {files: x, columns: {txt: content}}}\n")


def test_a_dataset_folder(tmp_path: Path) -> None:
    data = tmp_path / "set"
    (data / "test").mkdir(parents=True)
    for name, text in (("train", "a"), ("test", "b")):
        pq.write_table(pa.table({"text": [text]}), data / f"{name}-00000-of-00001.parquet")
    (data / "README.md").write_text("# Set\n")
    source = f"sources: {{s: {{files: {data}, format: hf%s}}}}\n"
    assert texts(do(tmp_path, source % "")) == ["a"]
    assert texts(do(tmp_path, source % ", split: test", "other")) == ["b"]
    with pytest.raises(InputError, match=r"Source `s`: .* has no split 'dev'"):
        shards(tmp_path, source % ", split: dev")
    with pytest.raises(SettingsError, match="`config` and `split` are for `format: hf`"):
        load(tmp_path, "sources: {s: {files: x, split: test}}\n")
    with pytest.raises(SettingsError, match=r"no format `parket`.*`parquet`"):
        load(tmp_path, "sources: {s: {files: x, format: parket}}\n")


def test_a_dataset_that_was_saved_to_disk(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    (tmp_path / "set/dataset_dict.json").write_text('{"splits": ["train"]}')
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    table = pa.table({"text": ["a", "b"]})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert texts(do(tmp_path, f"sources: {{s: {{files: {tmp_path}/set, format: hf}}}}\n")) == ["a", "b"]


def test_a_file_that_cannot_be_read_stops_the_run_or_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n')
    pq.write_table(pa.table({"txt": ["x"]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 cut")
    source = f"sources: {{s: {{files: '{tmp_path}/*.[jp]*'}}}}\nshard_bytes: 100\n"
    with pytest.raises(RunError, match=r"(?s)2 of 3 pieces .*were given up.*unreadable: count"):
        do(tmp_path, source)
    out = do(tmp_path, source + "unreadable: count\n")
    opened = open_run(out)
    assert verify(opened) == []
    assert texts(out) == ["good"]
    book = opened.stages()["read"]
    assert book.failed["unreadable"].documents == 2
    assert book.failed["unreadable"].bytes == sum((tmp_path / n).stat().st_size for n in ("b.parquet", "c.parquet"))
    problems = [problem for shard in opened.shards for problem in shard.problems]
    assert any("no column 'text'; there are txt" in problem for problem in problems)
    assert funnel(opened)[0].documents == 3
