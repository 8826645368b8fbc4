"""URL lists: what matches, and how files are read."""

import gzip

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels import hosts as kernel
from gristmill.stages.kernels.hosts import HashSet, hash_lines, split_url
from gristmill.stages.url import ListError, Url


def reasons(settings_of_stage, *urls):
    batch = pa.record_batch({"doc_id": [str(i) for i in range(len(urls))], "url": pa.array(urls, pa.string())})
    result = settings_of_stage(batch)
    found = dict(zip(result.dropped["doc_id"].to_pylist(), result.dropped["reasons"].to_pylist(), strict=True))
    assert set(found) | set(result.kept["doc_id"].to_pylist()) == set(batch["doc_id"].to_pylist())
    return [found.get(str(i), []) for i in range(len(urls))]


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("https://a.b.com/x?y=1#z", ("a.b.com", "/x?y=1")),
        ("http://user:pw@HOST.org:8080/p", ("HOST.org", "/p")),
        ("host.org", ("host.org", "")),
        ("host.org/p", ("host.org", "/p")),
        ("//host.org/p", ("host.org", "/p")),
        (" http://h.org./p ", ("h.org", "/p")),
        ("http://h.org:x/p", ("h.org", "/p")),
        ("http://h.org::80\\p", ("h.org", "\\p")),
        ("http://[::1/x", ("[::1", "/x")),
        ("http://h.org?q", ("h.org", "?q")),
        ("http://h.org.:80#f", ("h.org", "")),
        ("http://u@v@h.org/@", ("h.org", "/@")),
        ("http://[::1]:80/x", ("[::1]", "/x")),
        ("mailto:a@b.c", ("b.c", "")),
        ("/a/b", ("", "/a/b")),
        ("://", ("", "")),
        ("http://", ("", "")),
        ("a/b://c", ("a", "/b://c")),
        ("", ("", "")),
    ],
)
def test_parts_of_a_url(url, parts):
    raw = url.encode()
    data = np.frombuffer(b"/:#" + raw + b"/:.", np.uint8)  # guards
    host, host_stop, path, end = split_url(data, 3, 3 + len(raw))
    whole = data.tobytes()
    assert (whole[host:host_stop].decode(), whole[path:end].decode()) == parts


def test_hosts_domains_and_urls():
    stage = Url(
        hosts=("host.org",),
        domains=("example.com", "*.wild.net", "co.uk", "Müller.de", "com"),
        urls=("foo.com/a/b", "https://www.bar.com/q?x=1"),
    )
    assert reasons(
        stage,
        "https://host.org/x",
        "https://HOST.org.:8080",
        "https://www.host.org/",
        "https://example.com",
        "https://a.b.EXAMPLE.com/x",
        "https://notexample.com/",
        "https://example.com.evil.net/",
        "https://x.wild.net/",
        "https://shop.co.uk/",
        "https://any.com/",
        "https://com/",
        "https://xn--mller-kva.de/ü",
        "https://www.müller.de/",
        "http://foo.com/a/b/",
        "https://www.FOO.com/a/b#c",
        "https://foo.com/a/b?x",
        "https://foo.com/a",
        "http://bar.com/q?x=1",
    ) == [
        ["listed_host"],
        ["listed_host"],
        [],
        ["listed_domain"],
        ["listed_domain"],
        [],
        [],
        ["listed_domain"],
        ["listed_domain"],
        [],  # a last label alone lists a host of that name only
        ["listed_domain"],
        ["listed_domain"],
        ["listed_domain"],
        ["listed_url"],
        ["listed_url"],
        [],
        [],
        ["listed_url"],
    ]


W = "listed_word"


def test_words():
    stage = Url(words=("casino", "казино"), soft_words=("live", "cam", "hot"))
    assert reasons(
        stage,
        "https://x.org/best-CASINO/",
        "https://casino.org/",
        "https://x.org/casinos?q=1",
        "https://x.org/?casino#a",
        "https://x.org/a#casino",
        "https://x.org/казино",
        "https://x.org/caféCASINO",
        "https://x.org/live/live/live",
        "https://live.org/a?cam",
    ) == [[W], [W], [], [W], [W], [W], [W], [], ["too_many_soft_words"]]
    assert reasons(Url(soft_words=("live", "cam"), max_soft_words=2), "https://live.org/a?cam") == [[]]


def test_all_reasons_are_listed_in_order():
    stage = Url(hosts=("a.com",), domains=("a.com",), urls=("a.com/x",), words=("x",))
    assert reasons(stage, "http://a.com/x") == [["listed_host", "listed_domain", "listed_url", "listed_word"]]


def test_a_missing_url_is_a_rule_of_its_own():
    assert reasons(Url(words=("x",)), None, "", "http://y") == [[], [], []]
    assert reasons(Url(require_url=True), None, "", "http://y") == [["no_url"], ["no_url"], []]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_list_files(tmp_path, pack):
    lines = "# a comment\n\n  one.com  \r\ntwo.com\n0three.com\nmüller.de\nhttp://four.com/path\nfive.com"
    (tmp_path / "hosts").write_bytes(pack(lines.encode()))
    stage = Url(host_files=(str(tmp_path / "hosts"),))
    urls = ["one.com", "two.com", "0three.com", "müller.de", "four.com", "five.com", "a", "#"]
    assert [bool(found) for found in reasons(stage, *(f"http://{url}/" for url in urls))] == [True] * 6 + [False] * 2


def test_folders_of_lists_as_ut1_has_them(tmp_path):
    for name in ("adult", "ads"):
        (tmp_path / name).mkdir()
    (tmp_path / "adult" / "domains").write_text("bad.com\n1.2.3.4\n")
    (tmp_path / "ads" / "urls").write_text("ok.com/~user\n")
    stage = Url(folders=(str(tmp_path / "adult"), str(tmp_path / "ads")))
    assert reasons(stage, "http://w.bad.com", "http://1.2.3.4/x", "http://ok.com/~user/", "http://ok.com/") == [
        ["listed_domain"],
        ["listed_domain"],
        ["listed_url"],
        [],
    ]
    assert [path.rsplit("/", 2)[-2:] for path in stage.files()] == [["adult", "domains"], ["ads", "urls"]]


def test_lists_that_cannot_be_read_are_errors(tmp_path):
    (tmp_path / "none").write_text("# nothing\n\n")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"a.com\n" * 1000)[:-9])
    for stage, message in (
        (Url(host_files=(str(tmp_path / "gone"),)), "cannot be read"),
        (Url(host_files=(str(tmp_path / "none"),)), "has no entry"),
        (Url(host_files=(str(tmp_path / "cut.gz"),)), "cannot be read.*ends in the middle"),
        (Url(folders=(str(tmp_path),)), "`domains` or `urls`; there is neither"),
    ):
        with pytest.raises(ListError, match=message):
            reasons(stage, "http://a")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab.", min_size=1, max_size=6), min_size=1, max_size=8), st.text("ab.", max_size=8))
def test_domains_are_suffixes_at_dots(entries, host):
    def clean(name):
        return name.rstrip(".")

    host = clean(host)
    listed = {clean(entry.lstrip(".*")) for entry in entries} - {""}
    labels = host.split(".")
    parents = {".".join(labels[i:]) for i in range(1, len(labels) - 1)}
    expected = bool(host) and (host in listed or bool(parents & listed))
    assert bool(reasons(Url(domains=tuple(entries)), f"http://{host}/")[0]) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1)), st.lists(st.integers(0, 2**64 - 1)))
def test_a_hash_set_is_a_set(members, others):
    made = HashSet.of(np.array(members, np.uint64))
    for value in members + others:
        assert kernel._contains.py_func is not None
        assert _contains(made, value) == (value in set(members))
    assert len(made) == len(set(members))


def _contains(made, value):
    bucket = value >> 48
    part = made.hashes[made.starts[bucket] : made.starts[bucket + 1]]
    return value in part.tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=5), st.integers(0, 4))
def test_any_text_is_some_url_and_slices_agree(urls, start):
    stage = Url(hosts=("a",), domains=("b.c",), words=("x",))
    batch = pa.record_batch({"doc_id": [str(i) for i in range(len(urls))], "url": pa.array(urls, pa.string())})
    whole = stage(batch).kept["doc_id"].to_pylist()
    start = min(start, len(urls))
    assert stage(batch.slice(start)).kept["doc_id"].to_pylist() == [i for i in whole if int(i) >= start]


def test_bytes_outside_a_list_are_not_read():
    for kind in (kernel.HOSTS, kernel.ADDRESSES, kernel.WORDS):
        lines = b"a.b.com/c\nd"
        inside = np.frombuffer(b"zz" + lines + b"zz/.", np.uint8)
        alone = np.frombuffer(lines, np.uint8)
        np.testing.assert_array_equal(
            hash_lines(inside, 2, 2 + len(lines), kind), hash_lines(alone, 0, len(lines), kind)
        )
