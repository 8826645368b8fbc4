"""Settings files: what is read, what a base gives, and which words refuse a faulty file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, field_validator, model_validator
from ruamel.yaml import YAML

from gristmill.stages.documents import Settings
from gristmill.stages.settings_file import SettingsError, build, load, nearest, read

EXPECTED = "a mapping of settings is expected, for example `name: my_corpus`, but here is"
REFUSED_TAG = "is refused. Write a plain value."


class Leaf(Settings):
    """The innermost settings."""

    width: int = Field(default=1, ge=0)
    colour: str = "red"

    @field_validator("colour")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "blue":
            raise ValueError("blue is sold out. Take red.")
        return value


class Shape(Settings):
    """A member of a union, with a validator of its own."""

    layers: int = 1

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if self.layers < 1:
            raise ValueError("a shape has at least 1 layer")
        return self


class Top(Settings):
    """Models in every place where an annotation can have them."""

    name: str
    leaf: Leaf = Leaf()
    maybe: Leaf | None = None
    by_name: dict[str, Leaf] = Field(default_factory=dict)
    row: tuple[Leaf, ...] = ()
    pair: tuple[Leaf, Shape] | None = None
    many: list[dict[str, tuple[Leaf, ...]]] = Field(default_factory=list)
    noted: Annotated[Leaf | None, "a note"] = None
    shape: str | Shape = "small"
    files: str | list[str] = ""
    flag: bool = False
    kind: Literal["a", "b"] = "a"

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.name == "nobody":
            raise ValueError(f"there is no `{self.name}`.{nearest(self.name, ['somebody'])}")
        return self


def write(folder: Path, text: str, name: str = "s.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    """The message, with the file's folder taken off."""
    with pytest.raises(SettingsError) as caught:
        load(Top, path)
    return str(caught.value).replace(f"{path.parent}/", "")


# --- what is read ---


def test_worked_example(tmp_path: Path) -> None:
    text = "# a comment\nname: n\nleaf: &leaf {width: 0x10}\nmaybe: *leaf\nrow: [{width: 1_000}]\nflag: true\n"
    top = load(Top, write(tmp_path, text))
    assert top == Top(name="n", leaf=Leaf(width=16), maybe=Leaf(width=16), row=(Leaf(width=1000),), flag=True)


def test_values_are_plain(tmp_path: Path) -> None:
    text = "a:\n  1: x\n  yes: [1, 2.5, null, 'q']\nb: &b true\nc: *b\nd: |\n  text\ne: 1e3\n"
    values = read(write(tmp_path, text)).values
    expected = {"a": {"1": "x", "yes": [1, 2.5, None, "q"]}, "b": True, "c": True, "d": "text\n", "e": 1000.0}
    assert values == expected
    assert [type(values[key]) for key in "abcde"] == [dict, bool, bool, str, float]
    assert type(values["a"]["yes"]) is list


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("ab:#-'\" é\n", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(values=st.dictionaries(st.text("abc", min_size=1, max_size=4), plain_values, min_size=1))
def test_plain_values_come_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    with path.open("w", encoding="utf-8") as file:
        writer = YAML(typ="safe")
        writer.default_flow_style = False
        writer.dump(values, file)
    found = read(path)
    assert found.values == values
    lines = path.read_text("utf-8").splitlines()
    for key in values:
        line = int(found.at([key]).removeprefix(f"{path}:"))
        assert lines[line - 1].startswith((f"{key}:", f"? {key}"))


# --- base ---


def test_a_key_replaces_the_whole_value_of_the_base(tmp_path: Path) -> None:
    write(tmp_path, "name: b\nleaf: {width: 7, colour: green}\nrow: [{width: 1}]\n", "base.yaml")
    top = load(Top, write(tmp_path, "base: base.yaml\nname: n\nleaf: {width: 3}\n"))
    assert top == Top(name="n", leaf=Leaf(width=3, colour="red"), row=(Leaf(width=1),))


def test_a_base_counts_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, "name: b\n", "base.yaml")
    assert load(Top, write(tmp_path / "deep", "base: ../base.yaml\n")).name == "b"


def test_a_fault_is_named_in_the_file_where_the_key_stands(tmp_path: Path) -> None:
    write(tmp_path, "name: b\n\n\nleaf:\n  widht: 7\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nrow:\n  - {width: many}\n")
    assert refusal(path) == (
        "base.yaml:5: unknown key `leaf.widht`. Did you mean `width`?\n"
        "s.yaml:3: `row.0.width`: Input should be a valid integer, unable to parse string as an integer."
    )
    write(tmp_path, "flag: true\n", "base.yaml")
    assert refusal(write(tmp_path, "base: base.yaml\n")) == "s.yaml:1: `name` is missing."


@pytest.mark.parametrize(
    ("base", "text", "message"),
    [
        (
            "base: other.yaml\nname: b\n",
            "name: n\nbase: base.yaml\n",
            "s.yaml:2: the base base.yaml has a base itself; one level is all there is. Write it out.",
        ),
        ("name: b\n", "base: bas.yaml\n", "s.yaml:1: there is no base bas.yaml. Did you mean base.yaml?"),
        (
            "name: b\n",
            "base: [base.yaml]\n",
            "s.yaml:1: `base` is the path of one settings file, for example `base: demo.yaml`.",
        ),
        (
            "name: b\n",
            "base:\n",
            "s.yaml:1: `base` is the path of one settings file, for example `base: demo.yaml`.",
        ),
        (
            "- b\n",
            "base: base.yaml\n",
            f"base.yaml:1: {EXPECTED} a list.",
        ),
    ],
)
def test_a_base_that_cannot_be_used_is_refused(base: str, text: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, base, "base.yaml")
    assert refusal(write(tmp_path, text)) == message


def test_a_file_is_not_its_own_base(tmp_path: Path) -> None:
    assert "the base s.yaml has a base itself" in refusal(write(tmp_path, "base: s.yaml\nname: n\n"))


# --- faults of a file ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", f"s.yaml:1: {EXPECTED} a list."),
        ("just words\n", f"s.yaml:1: {EXPECTED} a single value."),
        ("", f"s.yaml:1: {EXPECTED} nothing."),
        ("name: n\nleaf:\n  width: 1\n  width: 2\n", "s.yaml:4: the key `width` is given twice. Keep one of them."),
        ("name: n\nby_name:\n  1: {}\n  '1': {}\n", "s.yaml:4: the key `1` is given twice. Keep one of them."),
        ("name: n\nleaf: !!python/name:os.abort x\n", "s.yaml:2: the tag `!!python/name:os.abort` " + REFUSED_TAG),
        ("name: n\nrow:\n- !mine {width: 1}\n", "s.yaml:3: the tag `!mine` " + REFUSED_TAG),
        ("name: n\nleaf: *lost\n", "s.yaml:2: not valid YAML: found undefined alias 'lost'."),
        ("name: n\nkind: \x07\n", "s.yaml:2: not valid YAML: the character U+0007."),
        ("name: n\n---\nname: m\n",
         "s.yaml:2: not valid YAML: expected a single document in the stream but found another document."),
        ("name: 2024-13-01\n", "s.yaml: not valid YAML: month must be in 1..12."),
    ],
)  # fmt: skip
def test_a_file_that_is_no_mapping_of_plain_values_is_refused(text: str, message: str, tmp_path: Path) -> None:
    assert refusal(write(tmp_path, text)) == message


def test_endless_nesting_is_refused(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, f"name: {'[' * 500}{']' * 500}\n")) == (
        "s.yaml: lists or mappings are nested too deep to be settings."
    )


def test_what_is_not_utf_8_is_named_with_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes("name: n\nleaf: {colour: grün}\n".encode("latin-1"))
    assert refusal(path) == "s.yaml:2: byte 0xfc is not UTF-8. Save the file in that encoding."


def test_a_missing_file_suggests_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "name: n\n", "curriculum.yaml")
    assert refusal(tmp_path / "curiculum.yaml") == "curiculum.yaml: no such file. Did you mean curriculum.yaml?"
    assert refusal(tmp_path / "zzz.yaml") == "zzz.yaml: no such file."
    assert refusal(tmp_path / "no_folder" / "zzz.yaml") == "zzz.yaml: no such file."


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").mkdir()
    assert refusal(tmp_path / "s.yaml") == "s.yaml: cannot be read: Is a directory."


# --- faults of values ---

WIDTH = "Did you mean `width`?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nam: n\n", "s.yaml:1: `name` is missing.\ns.yaml:1: unknown key `nam`. Did you mean `name`?"),
        ("name: n\nbse: b.yaml\n", "s.yaml:2: unknown key `bse`. Did you mean `base`?"),
        ("name: n\nleaf: {widht: 1}\n", f"s.yaml:2: unknown key `leaf.widht`. {WIDTH}"),
        ("name: n\nleaf: {zzz: 1}\n", "s.yaml:2: unknown key `leaf.zzz`. Known: colour, width."),
        ("name: n\nmaybe: {widht: 1}\n", f"s.yaml:2: unknown key `maybe.widht`. {WIDTH}"),
        ("name: n\nnoted: {widht: 1}\n", f"s.yaml:2: unknown key `noted.widht`. {WIDTH}"),
        ("name: n\nby_name:\n  x: {}\n  y: {widht: 1}\n", f"s.yaml:4: unknown key `by_name.y.widht`. {WIDTH}"),
        ("name: n\nby_name:\n  width: {widht: 1}\n", f"s.yaml:3: unknown key `by_name.width.widht`. {WIDTH}"),
        ("name: n\nby_name:\n  7: {widht: 1}\n", f"s.yaml:3: unknown key `by_name.7.widht`. {WIDTH}"),
        ("name: n\nrow:\n- {}\n- {widht: 1}\n", f"s.yaml:4: unknown key `row.1.widht`. {WIDTH}"),
        ("name: n\npair:\n- {}\n- {layer: 1}\n", "s.yaml:4: unknown key `pair.1.layer`. Did you mean `layers`?"),
        ("name: n\nmany:\n- x:\n  - {widht: 1}\n", f"s.yaml:4: unknown key `many.0.x.0.widht`. {WIDTH}"),
        (
            "name: n\nshape:\n  layer: 1\n",
            "s.yaml:2: `shape`: Input should be a valid string.\n"
            "s.yaml:3: unknown key `shape.layer`. Did you mean `layers`?",
        ),
        (
            "name: n\nfiles: 3\n",
            "s.yaml:2: `files`: Input should be a valid string.\ns.yaml:2: `files`: Input should be a valid list.",
        ),
        ("name: n\nleaf:\n  width: -1\n", "s.yaml:3: `leaf.width`: Input should be greater than or equal to 0."),
        ("name: n\nleaf:\n  colour: blue\n", "s.yaml:3: `leaf.colour`: blue is sold out. Take red."),
        ("name: nobody\n", "s.yaml:1: there is no `nobody`. Did you mean `somebody`?"),
        ("name: n\nkind: c\n", "s.yaml:2: `kind`: Input should be 'a' or 'b'."),
        ("name: n\nby_name:\n  base: &b {width: a}\n  x:\n    <<: *b\n",
         "s.yaml:3: `by_name.base.width`: Input should be a valid integer, unable to parse string as an integer.\n"
         "s.yaml:4: `by_name.x.width`: Input should be a valid integer, unable to parse string as an integer."),
    ],
)  # fmt: skip
def test_a_fault_has_file_line_key_and_what_next(text: str, message: str, tmp_path: Path) -> None:
    assert refusal(write(tmp_path, text)) == message


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    lines = refusal(write(tmp_path, "leaf: {width: -1}\nkind: c\ncolour: red\n")).splitlines()
    assert [line.split(":")[1] for line in lines] == ["1", "1", "2", "3"]


def test_a_part_of_a_file_is_named_from_its_top(tmp_path: Path) -> None:
    file = read(write(tmp_path, "name: n\nstages:\n  - leaf:\n      widht: 1\n"))
    assert file.at(["stages", 0, "leaf"]) == f"{tmp_path}/s.yaml:3"
    with pytest.raises(SettingsError, match=r"s\.yaml:4: unknown key `stages\.0\.leaf\.widht`\. Did you mean `width`"):
        build(Leaf, file.values["stages"][0]["leaf"], file, ["stages", 0, "leaf"])


def test_nearest_is_one_name_or_all_or_nothing() -> None:
    assert nearest("dosc", {"docs": 1, "code": 2}) == " Did you mean `docs`?"
    assert nearest("zzz", ["docs", "code"]) == " Known: code, docs."
    assert nearest("zzz", []) == ""
