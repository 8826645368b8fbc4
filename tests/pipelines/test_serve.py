"""All documents of a run behind a server of this machine: who may ask, and what is answered."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gristmill.pipelines import serve
from gristmill.pipelines.browse import Query, count, document_at, ordered, page, query
from gristmill.pipelines.inspect import Filter, Range
from gristmill.pipelines.open_run import RunError, open_run
from gristmill.pipelines.serve import Server

sys.path.append(str(Path(__file__).parent))
from browser import Tabs, chromium, picture
from fake_run import HOSTILE
from report_page import LONG_LINE, STAGES, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("run") / "run")


@contextmanager
def served(folder, stages=STAGES):
    """A server in a thread of its own."""
    server = Server(open_run(folder), stages)
    ready, ended = threading.Event(), threading.Event()
    stop = []

    async def answer():
        stop.append((asyncio.get_running_loop(), until := asyncio.Event()))
        await server.answer(ready.set, until)

    def work():
        asyncio.run(answer())
        ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(30)
    yield server
    loop, until = stop[0]
    loop.call_soon_threadsafe(until.set)
    thread.join(30)
    assert ended.is_set()


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as found:
        yield found


@pytest.fixture
def client(server):
    with httpx.Client(
        base_url=f"http://127.0.0.1:{server.port}", headers={"Authorization": f"Bearer {server.token}"}, timeout=30
    ) as found:
        yield found


def ids(documents):
    return [d["doc_id"] for d in documents]


def rows(dataset, keep):
    return {r["doc_id"] for r in dataset.to_table().to_pylist() if keep(r)}


# Who may ask


def test_the_address_is_traded_for_a_cookie(server):
    with httpx.Client(timeout=30) as client:
        first = client.get(server.url)
        assert first.status_code == 302
        assert first.headers["location"] == "/"
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert server.token not in cookie
        shown = client.get(f"http://127.0.0.1:{server.port}/")
        assert shown.status_code == 200
        assert "Gristmill report" in shown.text
        assert server.token not in shown.text


@pytest.mark.parametrize("where", ["/", "/documents", "/count", "/document", "/original", "/nothing"])
def test_without_the_token_there_is_nothing(server, where):
    base = f"http://127.0.0.1:{server.port}{where}"
    for headers in ({}, {"Authorization": "Bearer x"}, {"Cookie": f"gristmill-{server.port}={server.token}"}):
        answer = httpx.get(base, headers=headers, timeout=30)
        assert answer.status_code == 403
        assert "the address that `gristmill serve` printed" in answer.text
    assert httpx.get(base, params={"token": server.token[:-1]}, timeout=30).status_code == 403
    if where != "/":
        assert httpx.get(base, params={"token": server.token}, timeout=30).status_code == 403


def test_other_hosts_and_other_pages_get_nothing(server, client):
    for host in (
        "evil.example",
        f"evil.example:{server.port}",
        "127.0.0.1",
        f"127.0.0.1.evil.example:{server.port}",
        "",
    ):
        answer = client.get("/documents", headers={"Host": host})
        assert answer.status_code in (400, 403), host
        assert b"doc_id" not in answer.content
    assert client.get("/documents", headers={"Host": f"localhost:{server.port}"}).status_code == 200
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{server.port}"):
        assert client.get("/documents", headers={"Origin": origin}).status_code == 403
    assert client.get("/documents", headers={"Origin": f"http://127.0.0.1:{server.port}"}).status_code == 200


def test_only_this_machine_is_listened_to(server):
    assert {s.getsockname()[0] for s in server._sockets} == {"127.0.0.1"}
    mine = socket.gethostbyname_ex(socket.gethostname())[2]
    for address in [a for a in mine if not a.startswith("127.")]:
        with pytest.raises(ConnectionError):
            socket.create_connection((address, server.port), timeout=2).close()


def test_nothing_is_changed_and_everything_is_guarded(client):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/documents").status_code == 405
    for path in ("/", "/documents", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert "connect-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers
    assert client.get("/nothing").status_code == 404


# What is answered


def whole(client, **asked):
    """All documents of a question, page by page."""
    found, after = [], None
    for _ in range(1000):
        answer = client.get("/documents", params={**asked, **({"after": after} if after else {})}).json()
        found += answer["documents"]
        if answer["next"] is None:
            return found
        after = ",".join(map(str, answer["next"]))
    raise AssertionError("no end")


def test_every_document_comes_once(client, folder):
    run = open_run(folder)
    found = ids(whole(client, n=7))
    everything = [*run.dropped().to_table()["doc_id"].to_pylist(), *run.kept().to_table()["doc_id"].to_pylist()]
    assert len(found) == len(everything)
    assert sorted(found) == sorted(everything)
    assert len(found) > 240
    assert ids(whole(client, kept="1", n=100)) == run.kept().to_table()["doc_id"].to_pylist()


@pytest.mark.parametrize(
    ("asked", "kept", "keep"),
    [
        ({"reason": "too_few_words"}, False, lambda r: "too_few_words" in r["reasons"]),
        ({"stage": "exact", "source": "news"}, False, lambda r: r["stage"] == "exact" and r["source"] == "news"),
        ({"kept": "1", "language": "ar"}, True, lambda r: r["language"] == "ar"),
        (
            {"kept": "1", "measure": "fake_quality.words", "low": "30", "high": "60"},
            True,
            lambda r: 30 <= r["fake_quality.words"] <= 60,
        ),
        (
            {"kept": "1", "text": "KORN.de"},
            True,
            lambda r: "korn.de" in (r["url"] or "") or "korn.de" in r["text"].lower(),
        ),
        ({"kept": "0", "text": "onerror="}, False, lambda r: "onerror=" in (r["text"] or "")),
    ],
)
def test_filters_equal_the_files(client, folder, asked, kept, keep):
    run = open_run(folder)
    expected = rows(run.kept() if kept else run.dropped(), keep)
    found = ids(whole(client, **asked, n=5))
    assert set(found) == expected != set()
    assert len(found) == len(expected)
    counted = client.get("/count", params=asked).json()
    assert counted == {"documents": len(expected), "whole": True}


def test_an_order_by_a_measure(client, folder):
    values = sorted(open_run(folder).kept().to_table()["fake_quality.words"].to_pylist())
    asked = {"kept": "1", "order": "fake_quality.words", "n": 20}
    up = client.get("/documents", params={**asked, "down": "0"}).json()
    assert [d["measures"]["fake_quality.words"] for d in up["documents"]] == values[:20]
    more = client.get("/documents", params={**asked, "after": ",".join(map(str, up["next"]))}).json()
    assert [d["measures"]["fake_quality.words"] for d in more["documents"]] == values[20:40]
    down = client.get("/documents", params={**asked, "down": "1"}).json()
    assert [d["measures"]["fake_quality.words"] for d in down["documents"]] == values[::-1][:20]
    ids_up = [(d["part"], *d["place"]) for d in [*up["documents"], *more["documents"]]]
    assert len(set(ids_up)) == 40
    beyond = client.get("/documents", params={**asked, "after": "0,0,990"})
    assert beyond.status_code == 400
    assert "first 1,000 documents" in beyond.text


def test_long_texts_are_cut_and_given_whole(client, monkeypatch):
    monkeypatch.setattr(serve, "TEXT_CHARS", 1_000)
    found = whole(client, text="grain grain grain grain grain grain", n=50)
    (long,) = (d for d in found if d["more_chars"] == len(LONG_LINE) - 1_000)
    assert long["text"] == LONG_LINE[:1_000]
    place = {"part": long["part"], "group": long["place"][1], "row": long["place"][2]}
    assert client.get("/document", params=place).json()["text"] == LONG_LINE
    assert client.get("/original", params=place).json() == {"html": None, "more": 0}


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("/documents", {"reason": "nope"}, "drops nothing for 'nope'"),
        ("/documents", {"stage": "nope"}, "no stage 'nope'"),
        ("/documents", {"source": "nope"}, "no source 'nope'"),
        ("/documents", {"measure": "nope"}, "no measure 'nope'"),
        ("/documents", {"measure": "language_score", "low": "x"}, "low is 'x'"),
        ("/documents", {"n": "-1"}, "n is '-1'"),
        ("/documents", {"after": "1,2"}, "after is '1,2'"),
        ("/documents", {"after": "-1,0,0"}, "after is"),
        ("/document", {"part": "../../etc/passwd"}, "no document at that place"),
        ("/document", {"part": "01-extract/kept/../kept/part-00000.parquet"}, "no document at that place"),
        ("/document", {"part": "01-extract/kept/part-00000.parquet", "row": "99999"}, "no document at that place"),
        ("/original", {"part": "01-extract/ledger/part-00000.json"}, "no document at that place"),
    ],
)
def test_wrong_questions_are_answered_with_what_is_wrong(client, path, asked, said):
    answer = client.get(path, params=asked)
    assert answer.status_code == 400
    assert said in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


def test_the_page_is_drawn_again_when_the_run_went_on(tmp_path):
    folder = build(tmp_path / "run")
    with served(folder) as server:
        headers = {"Authorization": f"Bearer {server.token}"}
        url = f"http://127.0.0.1:{server.port}/"
        before = httpx.get(url, headers=headers, timeout=30).text
        assert httpx.get(url, headers=headers, timeout=30).text == before
        (folder / "02-exact/ledger/part-00003.json").unlink()
        assert "Segment 02-exact is unfinished" in httpx.get(url, headers=headers, timeout=30).text


# Without a server


def test_a_look_that_takes_too_long_says_where_to_go_on(folder):
    run = open_run(folder)
    asked = Query(kept=True, wanted=Filter(text="no such words anywhere"))
    found = page(run, asked, None, 10, seconds=0)
    assert found.documents == []
    assert found.timed_out
    assert found.next is not None
    looked_at, places = found.looked_at, [found.next]
    while found.next is not None:
        found = page(run, asked, found.next, 10, seconds=0)
        looked_at += found.looked_at
        places.append(found.next)
    assert looked_at == run.kept().count_rows()
    assert len(set(places)) == len(places)
    total, all_of_it = count(run, Query(kept=True), seconds=0)
    assert 0 < total < run.kept().count_rows()
    assert not all_of_it


def test_names_mean_what_they_mean_to_inspect(folder):
    run = open_run(folder)
    assert query(run, None, "exact", None, None, Filter()).kept is False
    assert query(run, True, "fake_quality", None, None, Filter()).segment == "01-extract"
    with pytest.raises(RunError, match="kept document has no reason"):
        query(run, True, None, "too_few_words", None, Filter())
    found = ordered(
        run, Query(wanted=Filter(ranges=(Range("exact.copies", 2),))), "exact.copies", 5, 0, descending=True
    )
    assert all(d["measures"]["exact.copies"] >= 2 for d in found.documents)
    one = found.documents[0]
    assert document_at(run, one["part"], *one["place"][1:])["doc_id"] == one["doc_id"]


def test_an_empty_run_is_served(tmp_path):
    with served(tmp_path) as server:
        headers = {"Authorization": f"Bearer {server.token}"}
        base = f"http://127.0.0.1:{server.port}"
        assert "No stage has run yet" in httpx.get(base, headers=headers, timeout=30).text
        answer = httpx.get(f"{base}/documents", headers=headers, timeout=30).json()
        assert answer == {"documents": [], "next": None, "looked_at": 0, "timed_out": False}


def test_original_pages_of_a_real_run(finished_run):
    from gristmill.pipelines.recipe import STAGES as REAL

    with served(finished_run, REAL) as server:
        headers = {"Authorization": f"Bearer {server.token}"}
        base = f"http://127.0.0.1:{server.port}"
        asked = {"kept": "1", "source": "docs", "n": 3}
        found = httpx.get(f"{base}/documents", params=asked, headers=headers, timeout=30).json()["documents"]
        assert len(found) == 3
        for document in found:
            place = {"part": document["part"], "group": document["place"][1], "row": document["place"][2]}
            html = httpx.get(f"{base}/original", params=place, headers=headers, timeout=30).json()["html"]
            assert "<" in html
            assert any(word in html for word in document["text"].split()[:20])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_the_address_and_ends_when_asked(tmp_path, number):
    """Started with Ctrl-C ignored, as a shell starts what runs in its background."""
    folder = build(tmp_path / "run")
    command = [sys.executable, "-u", "-m", "gristmill.pipelines.cli", "serve", str(folder)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            address = next(line.strip() for line in process.stdout if line.startswith("http://127.0.0.1:"))
            assert httpx.get(address, timeout=30).status_code == 302
            process.send_signal(number)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert said == ""


# In a browser


def test_browsing_in_chromium(server, folder, tmp_path):
    run = open_run(folder)
    with chromium() as browser:
        from playwright.sync_api import expect

        tabs = Tabs(browser, (f"http://127.0.0.1:{server.port}/",))
        tab = tabs.open(server.url)
        assert tab.url == f"http://127.0.0.1:{server.port}/"
        counted, number, where = (tab.locator(x) for x in ("#sample-count", "#sample-page", "#sample-list .where"))
        expect(counted).to_have_text(f"{run.kept().count_rows() + run.dropped().count_rows():,} documents")
        few = len(rows(run.dropped(), lambda r: "too_few_words" in r["reasons"]))
        tab.select_option("[name=reason]", "too_few_words")
        expect(counted).to_have_text(f"{few} documents")
        first = where.first.inner_text()
        tab.click("#sample-after")
        expect(number).to_have_text("page 2")
        assert where.first.inner_text() != first
        tab.click("#sample-before")
        expect(number).to_have_text("page 1")
        assert where.first.inner_text() == first
        tab.select_option("[name=reason]", "")
        tab.fill("[name=text]", "onerror=")
        expect(tab.locator("#sample-list mark.hit").first).to_have_text("onerror=")
        assert HOSTILE[:20] in tab.locator("#sample-list pre").first.inner_text()
        assert tab.title() == "fake · Gristmill report"
        tab.fill("[name=text]", "grain grain grain")
        tab.select_option("[name=kept]", "1")
        expect(counted).to_have_text(f"{len(rows(run.kept(), lambda r: 'grain grain grain' in r['text']))} documents")
        tab.fill("[name=text]", "")
        tab.select_option("[name=measure]", "fake_quality.words")
        tab.select_option("[name=order]", "down")
        most = max(run.kept().to_table()["fake_quality.words"].to_pylist())
        expect(tab.locator("#sample-list .measures").first).to_contain_text(f"fake_quality.words {most:.0f}")
        picture(tab, tmp_path, "served")
        assert tabs.wrong == []
        tabs.close()
