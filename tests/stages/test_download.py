"""Downloads from a local server that misbehaves in every way that servers do; waits are counted, never waited for."""

from __future__ import annotations

import base64
import gzip
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # importlib mode puts no folder of tests on the path
from web import BODY, ETAG, Site, serve

from gristmill.stages import download_http
from gristmill.stages.download import Card, Policy, Tools, Wanted, fetch, found_card, wait_s
from gristmill.stages.download_http import DownloadError, retry_after
from gristmill.stages.download_listing import Download, choose, sample


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with serve(monkeypatch) as made:
        yield made


@dataclass
class Clock:
    """Time that passes only where somebody waits."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)
    step: float = 0.0  # that each look takes

    def tools(self, chance: float = 1.0) -> Tools:
        def look() -> float:
            self.now += self.step
            return self.now

        def sleep(seconds: float) -> None:
            self.waits.append(seconds)
            self.now += seconds

        return Tools(look, sleep, lambda: chance)


POLICY = Policy(timeout_s=5.0, attempts=4)


def get(site: Site, folder: Path, clock: Clock | None = None, policy: Policy = POLICY, **wanted: object) -> Card:
    order = Wanted(f"{site.address}/data.bin", "sub/data.bin", **wanted)
    return fetch(order, str(folder), policy, (clock or Clock()).tools())


def left(folder: Path) -> list[str]:
    """Files that are on their way."""
    return [p.name for p in folder.rglob("*") if ".part" in p.name or p.name.endswith(".tmp")]


def test_a_file_comes_with_its_card(site: Site, tmp_path: Path) -> None:
    card = get(site, tmp_path)
    assert (tmp_path / "sub/data.bin").read_bytes() == BODY
    assert card.size == len(BODY)
    assert card.etag == ETAG
    assert card.xxh3 == xxhash.xxh3_128_hexdigest(BODY)
    assert card.verified == ("length",)
    assert left(tmp_path) == []
    assert get(site, tmp_path).found
    assert len(site.requests) == 1


def test_a_file_that_was_damaged_or_lost_is_fetched_again(site: Site, tmp_path: Path) -> None:
    get(site, tmp_path)
    (tmp_path / "sub/data.bin").write_bytes(BODY[:-1])
    assert not get(site, tmp_path).found
    (tmp_path / "sub/data.bin").unlink()
    assert not get(site, tmp_path).found
    assert (tmp_path / "sub/data.bin").read_bytes() == BODY


@pytest.mark.parametrize(
    ("faults", "ranges", "second"),
    [
        (["503"], True, None),
        (["500"], True, None),
        (["403"], True, None),
        (["429"], True, None),
        (["reset"], True, "resumes"),
        (["truncated"], True, "resumes"),
        (["truncated"], False, "resumes"),  # it asks from the middle on, and gets all
        (["truncated", "changed"], True, "resumes"),
        (["truncated", "wrong_range"], True, "resumes"),
        (["truncated", "wrong_total"], True, "resumes"),
        (["truncated", "416"], True, "resumes"),
        (["truncated", "truncated", "reset", "503", "truncated"], True, "resumes"),
    ],
)
def test_what_passes_is_asked_again(
    site: Site, tmp_path: Path, faults: list[str], ranges: bool, second: str | None
) -> None:
    site.faults, site.ranges = list(faults), ranges
    card = get(site, tmp_path)
    assert (tmp_path / "sub/data.bin").read_bytes() == (BODY[::-1] if "changed" in faults else BODY)
    assert card.attempts == len(site.requests) > len(faults) - ("changed" in faults)
    assert left(tmp_path) == []
    asked = site.requests[1][1]
    if second is None:
        assert asked is None
    else:
        received = int(str(asked).removeprefix("bytes=").rstrip("-"))
        assert 0 < received < len(BODY)


def test_waits_double_and_retry_after_is_kept(site: Site, tmp_path: Path) -> None:
    site.faults = ["503", "503", "503:30", "500"]
    clock = Clock()
    get(site, tmp_path, clock, Policy(timeout_s=5.0, attempts=8))
    assert clock.waits == pytest.approx([1, 2, 30 + 0.4, 8])


def test_who_brings_nothing_is_given_up_after_some_attempts(site: Site, tmp_path: Path) -> None:
    site.faults = ["403"] * 20
    clock = Clock()
    with pytest.raises(DownloadError, match=r"given up after 4 attempts, the last: HTTP 403"):
        get(site, tmp_path, clock)
    assert len(clock.waits) == 3


def test_attempts_that_bring_something_do_not_count(site: Site, tmp_path: Path) -> None:
    site.faults = ["truncated"] * 9
    assert get(site, tmp_path).attempts == 10  # of 4 in a row that bring nothing


def test_a_server_that_asks_for_hours_is_left_alone(site: Site, tmp_path: Path) -> None:
    site.faults = ["429:7200"]
    clock = Clock()
    with pytest.raises(DownloadError, match="asks to wait 7,200 s"):
        get(site, tmp_path, clock)
    assert clock.waits == []


@pytest.mark.parametrize("status", [400, 401, 404, 410])
def test_what_does_not_pass_is_said_at_once(site: Site, tmp_path: Path, status: int) -> None:
    site.faults = [str(status)]
    with pytest.raises(DownloadError, match=f"HTTP {status}"):
        get(site, tmp_path)
    assert len(site.requests) == 1


def test_a_killed_download_goes_on_from_its_last_byte(site: Site, tmp_path: Path) -> None:
    site.faults = ["truncated", "404"]
    with pytest.raises(DownloadError, match="404"):
        get(site, tmp_path)
    assert not (tmp_path / "sub/data.bin").exists()
    assert (tmp_path / "sub/.data.bin.part").stat().st_size == len(BODY) // 2
    get(site, tmp_path)
    assert site.requests[-1][1] == f"bytes={len(BODY) // 2}-"
    assert (tmp_path / "sub/data.bin").read_bytes() == BODY


def test_content_that_changed_between_two_starts_is_not_joined(site: Site, tmp_path: Path) -> None:
    site.faults = ["truncated", "404"]
    with pytest.raises(DownloadError):
        get(site, tmp_path)
    site.files["/data.bin"], site.etag = BODY[::-1], '"two"'
    assert get(site, tmp_path).etag == '"two"'
    assert (tmp_path / "sub/data.bin").read_bytes() == BODY[::-1]


def test_without_etag_and_date_nothing_is_joined(site: Site, tmp_path: Path) -> None:
    site.etag, site.faults = None, ["truncated"]
    get(site, tmp_path)
    assert [asked for _, asked in site.requests] == [None, None]
    assert (tmp_path / "sub/data.bin").read_bytes() == BODY


def test_a_weak_etag_is_no_proof(site: Site, tmp_path: Path) -> None:
    site.etag, site.faults = 'W/"one"', ["truncated"]
    get(site, tmp_path)
    assert [asked for _, asked in site.requests] == [None, None]


def test_checksums_decide(site: Site, tmp_path: Path) -> None:
    sound = {"sha256": hashlib.sha256(BODY).hexdigest(), "md5": hashlib.md5(BODY).hexdigest()}
    assert get(site, tmp_path, checksums=sound).verified == ("length", "sha256", "md5")
    with pytest.raises(DownloadError, match=r"its sha256 is .* is stated"):
        get(site, tmp_path / "other", checksums={"sha256": "0" * 64})
    assert not (tmp_path / "other/sub/data.bin").exists()
    assert left(tmp_path / "other") == []


def test_the_servers_own_checksum_finds_a_length_that_is_too_short(site: Site, tmp_path: Path) -> None:
    digest = base64.b64encode(hashlib.sha256(BODY).digest()).decode()
    site.headers, site.faults = {"Repr-Digest": f"sha-256=:{digest}:"}, ["short_length"]
    with pytest.raises(DownloadError, match="its sha256 is"):
        get(site, tmp_path)
    assert get(site, tmp_path).verified == ("length", "sha256")


def test_a_length_other_than_the_listings_is_refused(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="300,000 bytes are announced, the listing says 299,999"):
        get(site, tmp_path, size=len(BODY) - 1)
    site.faults = ["short_length"]
    assert get(site, tmp_path, size=len(BODY)).attempts == 2


def test_a_body_without_length_says_so(site: Site, tmp_path: Path) -> None:
    site.faults = ["endless"]
    card = get(site, tmp_path)
    assert card.size == len(BODY)
    assert card.verified == ()


def test_a_trickle_is_cut_off(site: Site, tmp_path: Path) -> None:
    clock = Clock(step=100.0)  # each block of 64 kB takes 100 s: 0.66 kB/s
    with pytest.raises(DownloadError, match=r"only [\d,]+ bytes in \d+ s"):
        get(site, tmp_path, clock, Policy(timeout_s=5.0, attempts=1, min_bytes_s=1e5))
    assert len(left(tmp_path)) == 2
    assert not (tmp_path / "sub/data.bin").exists()


def test_an_empty_file_is_a_file(site: Site, tmp_path: Path) -> None:
    site.files["/data.bin"] = b""
    assert get(site, tmp_path).size == 0
    assert (tmp_path / "sub/data.bin").read_bytes() == b""


def test_connections_are_used_again(site: Site, tmp_path: Path) -> None:
    for i in range(20):
        site.files[f"/{i}"] = BODY[: i * 100]
        fetch(Wanted(f"{site.address}/{i}", str(i)), str(tmp_path), POLICY, Clock().tools())
    assert len(site.peers) == 1


def test_a_host_that_asked_for_a_pause_gets_it_from_all(site: Site, tmp_path: Path) -> None:
    clock = Clock()
    download_http.GATE.hold(download_http.host_of(site.address), 12.0)
    get(site, tmp_path, clock)
    assert clock.waits == [12.0]


def test_no_server_at_all(tmp_path: Path, site: Site) -> None:
    with pytest.raises(DownloadError, match="ConnectError"):
        fetch(Wanted("http://127.0.0.1:9/x", "x"), str(tmp_path), POLICY, Clock().tools())


@given(st.integers(1, 40), st.none() | st.floats(0, 1e4), st.floats(0, 1))
def test_waits_are_bounded_and_no_less_than_asked(n: int, asked: float | None, chance: float) -> None:
    policy = Policy()
    found = wait_s(n, asked, policy, chance)
    assert (asked or 0.0) <= found <= (asked or 0.0) + policy.max_wait_s
    if asked is None:
        assert found >= min(policy.max_wait_s, policy.first_wait_s * 2 ** (n - 1)) / 2


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("120", 120.0), (None, None), ("", None), ("soon", None), ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0), ("-5", None)],
)
def test_retry_after_in_seconds_or_as_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, now=10.0) == seconds


# Which files


def listing(count: int) -> bytes:
    lines = [f"crawl-data/CC-MAIN-2024-10/segments/1.{i % 3}/wet/CC-MAIN-{i:05d}.warc.wet.gz" for i in range(count)]
    return gzip.compress("\n".join(lines).encode())


def test_a_crawl_by_its_id(site: Site) -> None:
    site.files["/crawl-data/CC-MAIN-2024-10/wet.paths.gz"] = listing(90)
    site.faults = ["503", "truncated"]
    settings = Download(crawl="CC-MAIN-2024-10", kind="wet", base_url=site.address + "/", files=10, seed=1)
    found = choose(settings, Clock().tools())
    assert len(found) == 10
    assert [w.name for w in found] == sorted(w.name for w in found)
    assert found[0].url == f"{site.address}/crawl-data/{found[0].name}"
    assert found[0].name.startswith("CC-MAIN-2024-10/segments/1.")
    more = choose(settings.model_copy(update={"files": None, "share": 0.5}), Clock().tools())
    assert len(more) == 45
    assert {w.url for w in found} <= {w.url for w in more}
    other = choose(settings.model_copy(update={"seed": 2}), Clock().tools())
    assert {w.url for w in other} != {w.url for w in found}


def test_a_crawl_that_there_is_not(site: Site) -> None:
    with pytest.raises(DownloadError, match=r"list of the crawl CC-MAIN-2099-01 .* HTTP 404 .*index\.commoncrawl"):
        choose(Download(crawl="CC-MAIN-2099-01", base_url=site.address), Clock().tools())


def test_a_mirror_on_a_disk(tmp_path: Path) -> None:
    folder = tmp_path / "crawl-data/CC-MAIN-2024-10"
    (folder / "segments/1.0/wet").mkdir(parents=True)
    (folder / "wet.paths.gz").write_bytes(listing(1))
    (folder / "segments/1.0/wet/CC-MAIN-00000.warc.wet.gz").write_bytes(BODY)
    wanted = choose(Download(crawl="CC-MAIN-2024-10", kind="wet", base_url=str(tmp_path)))
    card = fetch(wanted[0], str(tmp_path / "out"), POLICY)
    assert (tmp_path / "out" / wanted[0].name).read_bytes() == BODY
    assert card.verified == ("length",)


def test_a_list_of_addresses(site: Site, tmp_path: Path) -> None:
    digest = hashlib.sha256(BODY).hexdigest()
    text = f"# mine\n{site.address}/data.bin sha256:{digest}\n\n{site.address}/a/b.gz?x=1\n{site.address}/a/b.gz?x=2\n"
    (tmp_path / "list.txt").write_text(text)
    found = choose(Download(url_list=str(tmp_path / "list.txt")))
    assert len({w.name for w in found}) == 3
    assert [w.checksums for w in found if w.url.endswith("data.bin")] == [{"sha256": digest}]
    (tmp_path / "list.txt").write_text(f"{site.address}/data.bin sha256:short\n")
    with pytest.raises(DownloadError, match=r"list\.txt: 'sha256:short' is no checksum"):
        choose(Download(url_list=str(tmp_path / "list.txt")))


def test_a_listing_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("https://x.example/../../etc/passwd\nhttps://x.example/%2e%2e/.ssh/key\n")
    names = [w.name for w in choose(Download(url_list=str(tmp_path / "list.txt")))]
    assert names == ["x.example/etc/passwd", "x.example/ssh/key"]


def test_globs_of_a_disk(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"in/{i}").mkdir(parents=True)
        (tmp_path / f"in/{i}/x.jsonl").write_bytes(BODY[:i])
    found = choose(Download(urls=f"{tmp_path}/in/*/x.jsonl"))
    assert [(w.name, w.size) for w in found] == [("0/x.jsonl", 0), ("1/x.jsonl", 1), ("2/x.jsonl", 2)]
    with pytest.raises(DownloadError, match="No file matches"):
        choose(Download(urls=f"{tmp_path}/nothing/*"))
    with pytest.raises(DownloadError, match="a web server cannot list"):
        choose(Download(urls="https://x.example/*.gz"))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(b"{}")
    with pytest.raises(DownloadError, match=r"would both be called x\.jsonl"):
        choose(Download(urls=[f"{tmp_path}/a/*", f"{tmp_path}/b/*"]))


@pytest.mark.parametrize(
    "fields", [{}, {"crawl": "CC-MAIN-2024-10", "urls": "x"}, {"urls": "x", "files": 1, "share": 1}]
)
def test_settings_that_contradict_each_other(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"exactly one of|two ways to say"):
        Download(**fields)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 5))
def test_a_larger_sample_holds_the_smaller(few: int, many: int, seed: int) -> None:
    all_ = [Wanted(f"https://x/{i}", str(i)) for i in range(50)]
    few, many = sorted((few, many))
    small, large = sample(all_, few, None, seed), sample(all_[::-1], many, None, seed)
    assert len(small) == min(few, 50)
    assert {w.name for w in small} <= {w.name for w in large}


def test_cards_are_of_address_and_checksum(site: Site, tmp_path: Path) -> None:
    get(site, tmp_path)
    url = f"{site.address}/data.bin"
    assert found_card(Wanted(url, "sub/data.bin"), str(tmp_path)) is not None
    assert found_card(Wanted(url + "?2", "sub/data.bin"), str(tmp_path)) is None
    assert found_card(Wanted(url, "sub/data.bin", size=5), str(tmp_path)) is None
    assert found_card(Wanted(url, "sub/data.bin", checksums={"md5": "0" * 32}), str(tmp_path)) is None
    cards = list((tmp_path / ".download").iterdir())
    assert [orjson.loads(c.read_bytes())["size"] for c in cards] == [len(BODY)]
