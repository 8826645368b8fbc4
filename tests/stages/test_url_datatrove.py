"""The stage `url` against datatrove's URLFilter: what that drops by a list goes here by the same list."""

import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import URLFilter
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tldextract import TLDExtract

from gristmill.stages.url import Url

# Of tldextract's name for a domain, which datatrove uses.
pytestmark = pytest.mark.filterwarnings("ignore:The 'registered_domain' property is deprecated:DeprecationWarning")

SAME = {  # datatrove's reason -> ours
    "domain": "listed_domain",
    "subdomain": "listed_domain",
    "url": "listed_url",
    "hard_blacklisted": "listed_word",
    "soft_blacklisted": "too_many_soft_words",
    "blacklisted_subword": "listed_subword",
}
LISTS = {
    "domains": ["example.com", "shop.example.co.uk", "b.a.example.com", "host.org", "xn--mller-kva.de"],
    "urls": ["http://host.org/a/b", "https://example.com/a/b/", "http://8.8.8.8/casino?x=1"],
    "words": ["casino", "porn"],
    "soft_words": ["live", "cam", "hot", "best"],
    "subwords": ["orgcas", "camx", "notexample", "asino", "Free-Slots!"],
}
HOSTS = (
    "example.com a.example.com b.a.example.com notexample.com example.co.uk shop.example.co.uk host.org EXAMPLE.com "
    "müller.de xn--mller-kva.de 8.8.8.8 [2001:db8::1] localhost example.com. www。example。com 例え.jp "
    "a..example.com -.org exa%6Dple.com"
).split()
SCHEMES = ["http://", "https://", "HTTP://", "//", "", "ftp://", "http:/", "http:///", " http://", "javascript:"]
USERS = ["", "", "", "user@", "u:p@", "u@v@", "example.com@"]
PORTS = ["", "", "", ":80", ":", "::8080", ":abc"]
PATHS = [
    *"/ /a/b /a/b/ /casino /best-CASINO/ /casino?x=1 /a?b=casino /a#casino /caféporn /caf%C3%A9porn /live/cam".split(),
    *"/x/../y \\x /live_cam ?q #f /hot-live /free_slots /freeéslots".split(),
    "",
    " /sp ace",
]


@pytest.fixture(scope="module")
def theirs():
    """URL -> the reason for which datatrove drops it, or None."""
    block = URLFilter(
        use_integrated_lists=False,
        extra_domains=LISTS["domains"],
        extra_urls=LISTS["urls"],
        banned_words=LISTS["words"],
        soft_banned_words=LISTS["soft_words"],
        banned_subwords=LISTS["subwords"],
    )
    block.tldextractor = TLDExtract(suffix_list_urls=(), cache_dir=None)  # the list that the package carries

    def decide(url):
        answer = block.filter(Document("", "d", metadata={"url": url}))
        return None if answer is True else answer[1]

    return decide


def ours(urls, lists=LISTS):
    batch = pa.record_batch({"doc_id": [str(i) for i in range(len(urls))], "url": pa.array(urls, pa.string())})
    dropped = Url(**lists)(batch).dropped
    found = dict(zip(dropped["doc_id"].to_pylist(), dropped["reasons"].to_pylist(), strict=True))
    return [found.get(str(i), []) for i in range(len(urls))]


def differ(urls, theirs):
    return [
        (url, reason, got)
        for url, got in zip(urls, ours(urls), strict=True)
        if (reason := theirs(url)) is not None and SAME[reason] not in got
    ]


def test_what_datatrove_drops_goes_here_too(theirs):
    """Ports, users, scripts, upper case, dots at the end, percent-escapes, IPv6, no scheme, no host."""
    rng = random.Random(1)
    parts = (SCHEMES, USERS, [*HOSTS, ""], PORTS, PATHS)
    urls = ["".join(rng.choice(part) for part in parts) for _ in range(12_000)]
    urls = [url for url in urls if url]
    assert differ(urls, theirs) == []
    assert {theirs(url) for url in urls} == {*SAME, None}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["http", ":", "//", "/", "host.org", "@", ".", "?", "#", "casino", "é", "。", "[", "]", " ", "80", "%2F", "xn--"]), min_size=1, max_size=9).map("".join))  # fmt: skip  # noqa: E501
def test_what_datatrove_drops_goes_here_too_for_any_text(theirs, url):
    assume("。" not in url.partition("://")[0])  # in punycode, such a host reads as a scheme
    assert differ([url], theirs) == []


def test_the_same_decisions_on_plain_urls(theirs):
    """Scheme, host, path, in lower case and ASCII: the decision is equal where both have the rule."""
    rng = random.Random(2)
    hosts = [host for host in HOSTS if host.isascii() and host == host.lower() and "%" not in host]
    paths = [path for path in PATHS if path.isascii() and path == path.lower() and "\\" not in path]
    hosts = [host for host in hosts if host != "a..example.com"]
    urls = ["https://" + rng.choice(hosts) + rng.choice(paths) for _ in range(4_000)]
    # A list of URLs is compared as it stands there, without scheme here.
    for url, got in zip(urls, ours(urls, LISTS | {"urls": ()}), strict=True):
        reason = theirs(url)
        assert bool(got) == (reason is not None), (url, reason, got)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://EXAMPLE.com/", "listed_domain"),  # case
        ("https://x.b.a.org/", "listed_domain"),  # a parent that is neither the registered domain nor the host
        ("https://any.co.uk/", "listed_domain"),  # a public suffix
        ("https://8.8.4.4/", "listed_domain"),  # an IP address, as UT1 has them
        ("https://host.org/A", "listed_url"),  # a list without schemes, as UT1 is
        ("https://x.org/CASINO", "listed_word"),
        ("https://x.org/казино", "listed_word"),  # letters of another script
        ("https://x.org/онлайн-казинобет", "listed_subword"),
    ],
)
def test_what_datatrove_keeps_by_the_same_lists(url, reason):
    domains, words = ["example.com", "b.a.org", "co.uk", "8.8.4.4"], ["casino", "казино"]
    block = URLFilter(
        use_integrated_lists=False, extra_domains=domains, extra_urls=["host.org/a"], banned_words=words[:1]
    )
    block.tldextractor = TLDExtract(suffix_list_urls=(), cache_dir=None)
    assert block.filter(Document("", "d", metadata={"url": url})) is True
    lists = {"domains": domains, "urls": ["host.org/a"], "words": words, "subwords": ["казиноБет"]}
    assert reason in ours([url], lists)[0]


def test_lists_of_subwords(tmp_path):
    path = tmp_path / "subwords.txt"
    path.write_text("# a comment\n\nBest-Bets\nнов.ост\n" + "".join(f"word{i}x\n" for i in range(1200)))
    urls = ["https://b.estbets.org", "https://x.org/НОВОСТ.1", "https://x.org/word1199-x", "https://x.org/word1200x"]
    assert ours(urls, {"subword_files": [str(path)]}) == [["listed_subword"]] * 3 + [[]]
    assert Url(subword_files=(str(path),)).files() == [str(path)]


_MEASURE = """
import pathlib, sys
import pyarrow as pa
from gristmill.stages.url import Url
urls = ["http://a.host0.of.domain0.example.org/x", "http://host976.of.domain976.example.org", "http://host3000000.org"]
batch = pa.record_batch({"doc_id": ["0", "1", "2"], "url": urls})
print(Url(folders=(sys.argv[1],))(batch).dropped["doc_id"].to_pylist())
status = pathlib.Path("/proc/self/status").read_text()  # getrusage begins at the peak of the parent
print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
"""


@pytest.mark.end_to_end
def test_three_million_entries_in_a_process_of_its_own(tmp_path: Path):
    with (tmp_path / "domains").open("w") as file:
        file.writelines(f"host{i}.of.domain{i % 977}.example.org\n" for i in range(3_000_000))
    shown = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    found, mebibytes = shown.splitlines()
    assert found == "['0', '1']"
    assert int(mebibytes) < 500  # 392 when it was measured, 230 to 295 of which are Python, Arrow and numba
