"""Folders of Hugging Face datasets: which files a split has, by each of the three layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.stages.hf_folder import HfError, hf_files
from gristmill.stages.shards import filesystem


def make(folder: Path, *names: str, card: str = "") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    (folder / "README.md").write_text(f"---\n{card}\n---\n# A dataset\n" if card else "# A dataset\n")
    return folder


def files(folder: Path, split: str = "train", config: str | None = None) -> list[str]:
    fs, inner = filesystem(str(folder))
    return [path.removeprefix(f"{inner}/") for path in hf_files(fs, inner, config, split)]


def test_splits_by_the_names_of_files(tmp_path: Path) -> None:
    make(tmp_path, "data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet",
         "data/test-0.parquet", "my_eval.csv", "dev/x.jsonl.zst", ".cache/train.parquet", "notes.pdf")  # fmt: skip
    assert files(tmp_path) == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert files(tmp_path, "test") == ["data/test-0.parquet", "my_eval.csv"]
    assert files(tmp_path, "validation") == ["dev/x.jsonl.zst"]
    with pytest.raises(HfError, match="no split 'extra'"):
        files(tmp_path, "extra")


def test_without_keywords_all_is_train(tmp_path: Path) -> None:
    assert files(make(tmp_path, "a.parquet", "b/constraint.jsonl")) == ["a.parquet", "b/constraint.jsonl"]


CARD = """
configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: ["en/a*.parquet", "en/more/**"]
  - split: rare
    path: en/b.parquet
- config_name: de
  data_files: "de/**/*.parquet"
- config_name: fr
  data_dir: fr
"""


def test_configurations_of_the_card(tmp_path: Path) -> None:
    make(tmp_path, "en/a1.parquet", "en/b.parquet", "en/more/x/y.parquet", "de/1.parquet", "de/x/2.parquet",
         "fr/test.parquet", "fr/train.parquet", card=CARD)  # fmt: skip
    assert files(tmp_path) == ["en/a1.parquet", "en/more/x/y.parquet"]
    assert files(tmp_path, "rare") == ["en/b.parquet"]
    assert files(tmp_path, config="de") == ["de/1.parquet", "de/x/2.parquet"]
    assert files(tmp_path, config="fr") == ["fr/train.parquet"]
    with pytest.raises(HfError, match=r"no configuration 'it'\. Say `config:` with one of: en, de, fr"):
        files(tmp_path, config="it")
    with pytest.raises(HfError, match=r"no split 'test'\. It has: train, rare"):
        files(tmp_path, "test")


def test_saved_to_disk(tmp_path: Path) -> None:
    make(tmp_path, "train/data-00000-of-00001.arrow", "train/cache-1.arrow")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    (tmp_path / "train/state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert files(tmp_path) == ["train/data-00000-of-00001.arrow"]
    assert files(tmp_path / "train") == ["data-00000-of-00001.arrow"]
    with pytest.raises(HfError, match=r"no split 'test'\. It has: train"):
        files(tmp_path, "test")


@pytest.mark.parametrize(
    ("card", "message"),
    [("configs: [", "is not YAML"), ("configs: [{data_files: 'x/*'}]", r"no file matches x/\*, which its README")],
)
def test_a_card_that_does_not_fit_is_an_error(tmp_path: Path, card: str, message: str) -> None:
    with pytest.raises(HfError, match=message):
        files(make(tmp_path, "a.parquet", card=card))


def test_a_folder_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HfError, match="It has: no data files"):
        files(make(tmp_path, "notes.pdf"))
    with pytest.raises(HfError, match="is not a folder"):
        files(tmp_path / "README.md")
