"""The benchmark of extraction: labels and F1 by hand, and one run on a few pages."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from extract_labels import f1, label, labelled, tokens  # noqa: E402

WORDS = " ".join(f"word{i}" for i in range(80))
NAVIGATION = "<div id='header'><a href='/'>Home</a> <a href='/a'>About</a></div>"


def page(words: str = WORDS) -> bytes:
    content = f"<h1>Heading</h1><p>{words}.</p><script>var x;</script><p>{words}</p>"
    return f"<html><body>{NAVIGATION}<div id='content'>{content}</div><p>Footer</p></body></html>".encode()


def test_f1_by_hand() -> None:
    assert tokens("The cat's 日本") == ["the", "cat", "s", "日", "本"]
    assert f1("a b b c", "b b b d") == pytest.approx(2 * 2 / 8)
    assert f1("", "a") == f1("a", "") == 0
    assert f1("A b", "b a") == 1


def test_a_label_is_the_main_element_and_nothing_else() -> None:
    assert (label("git-doc.example", page("one two")) or "").split() == ["Heading", "one", "two.", "one", "two"]
    sphinx = b"<body><div role='main'><h1>T<a class='headerlink'>#</a></h1><p>x</p></div><p>y</p></body>"
    assert (label("linux-doc-6.1.example", sphinx) or "").split() == ["T", "x"]
    docbook = b"<body><p>n</p><div class='sect1 x'><div class='toc'>c</div><div class='sect2'>m</div></div></body>"
    assert (label("aptitude-doc-cs.example", docbook) or "").split() == ["m"]
    sphinx = b"<body><div class='related'>r</div><div class='body'>m</div><div class='sphinxsidebar'>s</div></body>"
    assert label("debian-policy.example", sphinx) == label("developers-reference-de.example", sphinx) == "m"
    javadoc = b"<body><header><nav>n</nav></header><main><h1>m</h1></main><footer>f</footer></body>"
    assert label("openjdk-17-doc.example", javadoc) == "m"
    rustdoc = (
        b"<body><nav class='sidebar'>s</nav><main><section id='main-content'>m<a class='anchor'>#</a></section></main>"
    )
    assert label("rust-doc.example", rustdoc) == "m"
    assert label("git-doc.example", b"<body><p>x</p></body>") is None
    assert label("other.example", page()) is None
    assert label("git-doc.example", b"\xff" + page()) is None


def test_hosts_take_turns() -> None:
    pages = [(f"https://git-doc.example/{i}.html", page()) for i in range(50)]
    pages += [(f"https://apache2-doc.example/{i}.html", page().replace(b"'content'", b"'page-content'")) for i in "ab"]
    pages += [("https://git-doc.example/genindex.html", page()), ("https://git-doc.example/short.html", page("few"))]
    found = labelled(pages, 16)
    assert [p.host for p in found] == ["apache2-doc.example"] * 2 + ["git-doc.example"] * 2
    assert labelled(reversed(pages), 16) == found


@pytest.mark.end_to_end
def test_runs_on_a_few_pages(tmp_path: Path) -> None:
    records = []
    for i in range(6):
        body = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + page()
        head = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{i}>\r\nContent-Type: application/http\r\n"
        )
        head += f"WARC-Target-URI: https://git-doc.example/{i}.html\r\nContent-Length: {len(body)}\r\n\r\n"
        records.append(gzip.compress(head.encode() + body + b"\r\n\r\n"))
    (tmp_path / "a.warc.gz").write_bytes(b"".join(records))
    options = ["--min-pages", "4", "--pages", "48", "--rounds", "1", "--skip", "datatrove", "--json"]
    command = [sys.executable, "benchmarks/extract.py", "--corpus", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["bench"] for row in rows} == {
        "extract.read", "extract.extract", "extract.f1", "extract.f1_recall", "extract.f1_rescue", "extract.f1_plain",
    }  # fmt: skip
    for row in rows:
        assert list(row) == ["bench", "value", "unit", "peer", "peer_value", "ratio"]
        if row["unit"] == "F1":
            assert 0.8 < row["value"] <= 1
    few = subprocess.run([*command[:4], "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "pages whose main text is known; 100 are needed" in few.stderr
