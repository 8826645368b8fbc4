"""Secrets: the shapes by hand, what is none, and that gitleaks' and detect-secrets' own patterns agree.

No token below was ever issued: they are runs of letters in order, or drawn from a seeded generator.
"""

import base64
import json
import random
import re
import string

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.ledger import StageLedger, book
from gristmill.stages.pii import Pii
from gristmill.stages.pii_secrets import KINDS

ALNUM = string.ascii_letters + string.digits
RNG = random.Random(20)


def drawn(count, letters=ALNUM):
    return "".join(RNG.choices(letters, k=count))


def encoded(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def pem(kind="RSA ", lines=4, newline="\n"):
    body = newline.join(drawn(64) for _ in range(lines))
    return (
        f"-----BEGIN {kind}PRIVATE KEY-----{newline}{body}{newline}{drawn(20)}={newline}-----END {kind}PRIVATE KEY-----"
    )


JWT = f"{encoded({'alg': 'HS256', 'typ': 'JWT'})}.{encoded({'sub': '1234567890', 'admin': True})}.{drawn(43)}"
OPENAI_OLD = f"sk-{drawn(20)}T3BlbkFJ{drawn(20)}"
TOKENS = {
    "aws_keys": ["AKIA" + drawn(16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"), "ASIA" + "QRSTUVWXYZ234567"],
    "github_tokens": [*(f"gh{kind}_{drawn(36)}" for kind in "pousr"), f"github_pat_{drawn(22)}_{drawn(59)}"],
    "slack_tokens": [
        f"xoxb-{drawn(12, string.digits)}-{drawn(12, string.digits)}-{drawn(24)}",
        f"xoxp-{'-'.join(drawn(12, string.digits) for _ in range(3))}-{drawn(32, 'abcdef0123')}",
        f"https://hooks.slack.com/services/T{drawn(10)}/B{drawn(10)}/{drawn(24)}",
    ],
    "google_keys": ["AIza" + drawn(34) + "-", "AIza" + drawn(35)],
    "openai_keys": [
        OPENAI_OLD,
        f"sk-proj-{drawn(58)}T3BlbkFJ{drawn(58)}",
        f"sk-svcacct-{drawn(74)}T3BlbkFJ{drawn(74)}",
    ],
    "stripe_keys": [f"sk_live_{drawn(24)}", f"rk_live_{drawn(99)}"],
    "jwts": [JWT],
    "private_keys": [
        pem(),
        pem(""),
        pem("EC ", 1),
        pem("OPENSSH ", newline="\r\n"),
        pem(newline=" "),
        pem(newline="\\n"),
        f"-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: 1\n\n{drawn(64)}\n-----END PGP PRIVATE KEY BLOCK-----",
        f"---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\n{drawn(70)}\n---- END SSH2 ENCRYPTED PRIVATE KEY ----",
    ],
}  # fmt: skip
VALUES = dict(
    zip(
        KINDS,
        "<AWS_KEY> <GITHUB_TOKEN> <SLACK_TOKEN> <GOOGLE_KEY> <OPENAI_KEY> <STRIPE_KEY> <JWT> <PRIVATE_KEY>".split(),
        strict=True,
    )
)
ALL = [(kind, token) for kind, tokens in TOKENS.items() for token in tokens]


def batch_of(texts):
    return pa.record_batch({"doc_id": [str(i) for i in range(len(texts))], "text": pa.array(texts, pa.string())})


def run(*texts, **options):
    return Pii(secrets=True, **options)(batch_of(texts)).kept["text"].to_pylist()


@pytest.mark.parametrize(("kind", "token"), ALL, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(ALL)])
def test_each_shape_is_found_whole(kind, token):
    value = VALUES[kind]
    texts = [token, f'key = "{token}"', f"密钥{token}。", f"é {token}\nnext", f"a={token};b={token}\n"]
    assert run(*texts) == [text.replace(token, value) for text in texts]
    assert Pii()(batch_of([token])).kept["text"].to_pylist() == [token]  # off by default
    result = Pii(secrets=True)(batch_of(texts))
    assert {k: n for k, n in result.counters.items() if n} == {f"{kind}_replaced": 6, "documents_changed": 5}
    assert run(*run(*texts)) == run(*texts)


@pytest.mark.parametrize(
    "text",
    [
        "AKIAIOSFODNN7EXAMPLE AKIA AKIA1234567890123456 AKIAABCDEFGHIJKLMNOPQ xAKIAABCDEFGHIJKLMNOP",
        "ghp_short ghp_xxxxxxxxxxxxxxxxxx gho_ github_pat_11AAAA see ghp_... " + "xghp_" + "a" * 36,
        "xoxb-your-token xoxb-123 hooks.slack.com/services/T0/B0/X0",
        "AIzaSy AIza" + "a" * 36,
        "sk-your-key-here sk-1234 task-T3BlbkFJ risk-" + "a" * 20 + "T3BlbkFJ",
        "sk_test_" + "a" * 24 + " sk_live_short pk_live_" + "a" * 24,
        "eyJhbGciOi.eyJzdWIiOi.sig eyJxxxxxxxxxxxxxxxxx.eyJyyyyyyyyyyyyyyyyyyyy.zzzzzzzzzzzzzz",
        "A file begins with -----BEGIN RSA PRIVATE KEY----- and ends with -----END RSA PRIVATE KEY-----, in which "
        "lines of base 64 stand.",
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
        "-----BEGIN CERTIFICATE-----\n" + "a" * 64 + "\n-----END CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----\n" + "a" * 64 + "\n-----END PUBLIC KEY-----",
        "-----END RSA PRIVATE KEY-----",
        "",
    ],
)
def test_what_stays(text):
    assert run(text) == [text]


def test_private_keys_whose_end_is_cut_off():
    body = "\n".join(drawn(64) for _ in range(3))
    head = "-----BEGIN RSA PRIVATE KEY-----"
    whole = pem()
    assert run(
        f"x {head}\n{body}",
        f"x {head}\n{body}\nMore text.",
        f"{head}\n{body}\n{whole} y",
        f"{head} is a head. {whole} y",
    ) == [
        "x <PRIVATE_KEY>",
        "x <PRIVATE_KEY>\nMore text.",
        "<PRIVATE_KEY>\n<PRIVATE_KEY> y",
        f"{head} is a head. <PRIVATE_KEY> y",
    ]


def test_a_secret_goes_before_an_address_and_an_address_before_a_number():
    token = TOKENS["github_tokens"][0]
    key = pem()
    inside = key.replace("\n", "\nComment: a@b.org 8.8.8.8\n", 1)
    texts = [f"https://{token}@github.com/x", f"{inside} a@b.org", "+49.30.90.18.20@b.org"]
    result = Pii(secrets=True, phone_numbers=True)(batch_of(texts))
    assert result.kept["text"].to_pylist() == [
        "https://<GITHUB_TOKEN>@github.com/x",
        "<PRIVATE_KEY> email@example.com",
        "+email@example.com",
    ]
    ledger = StageLedger(stage="pii")
    book(ledger, batch_of(texts), result.kept, result.dropped, result.counters)
    ledger.check("here")


def test_values_are_settings():
    names = ("aws_key", "github_token", "slack_token", "google_key", "openai_key", "stripe_key", "jwt", "private_key")
    options = {f"{name}_value": f"[{name}]" for name in names}
    got = run(*(tokens[0] for tokens in TOKENS.values()), **options)
    assert got == [f"[{name}]" for name in names]
    assert run(JWT, jwt_value="") == [""]


GITLEAKS = {  # config/gitleaks.toml, without the lookahead at what follows a token
    "aws_keys": r"\b((?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16})\b",
    "github_tokens": r"gh[pousr]_[0-9a-zA-Z]{36}|github_pat_\w{82}",
    "slack_tokens": r"xoxb-[0-9]{10,13}-[0-9]{10,13}[a-zA-Z0-9-]*|xox[pe](?:-[0-9]{10,13}){3}-[a-zA-Z0-9-]{28,34}"
    r"|https://hooks.slack.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{43,56}",
    "google_keys": r"\bAIza[\w-]{35}",
    "openai_keys": r"\bsk-(?:proj|svcacct|admin)-(?:[A-Za-z0-9_-]{74}T3BlbkFJ[A-Za-z0-9_-]{74}|[A-Za-z0-9_-]{58}"
    r"T3BlbkFJ[A-Za-z0-9_-]{58})\b|\bsk-[a-zA-Z0-9]{20}T3BlbkFJ[a-zA-Z0-9]{20}",
    "jwts": r"\bey[a-zA-Z0-9]{17,}\.ey[a-zA-Z0-9\/\\_-]{17,}\.(?:[a-zA-Z0-9\/\\_-]{10,}={0,2})?",
    "private_keys": r"(?i)-----BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY(?: BLOCK)?-----[\s\S-]{64,}?KEY(?: BLOCK)?-----",
}  # fmt: skip
DETECT_SECRETS = {  # detect_secrets/plugins of 1.5.0
    "github_tokens": r"(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9_]{36}",
    "stripe_keys": r"(?:r|s)k_live_[0-9a-zA-Z]{24}",
    "openai_keys": r"sk-[A-Za-z0-9-_]*[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}",
}


@pytest.mark.parametrize("peer", [GITLEAKS, DETECT_SECRETS], ids=["gitleaks", "detect-secrets"])
def test_what_the_peers_find_is_found(peer):
    for kind, pattern in peer.items():
        found = [token for token in TOKENS[kind] if re.search(pattern, token)]
        assert found, kind
        for token in found:
            assert run(f" {token} ") == [f" {VALUES[kind]} "]  # the whole, of which the peer may take a part


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=10),
            st.sampled_from(ALL),
        ),
        max_size=5,
    )
)
def test_text_around_a_secret_is_untouched_in_every_script(parts):
    options = {"emails": False, "ipv4": False, "ipv6": False}
    text = "".join(f"{word} {token} " for word, (_, token) in parts)
    assert run(text, **options) == ["".join(f"{word} {VALUES[kind]} " for word, (kind, _) in parts)]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("a-_.\n é中"), max_size=6) | st.sampled_from([t for _, t in ALL]), max_size=6),
    st.integers(0, 3),
)
def test_slices_and_repetition(texts, start):
    once = run(*texts)
    assert run(*once) == once
    start = min(start, len(texts))
    assert Pii(secrets=True)(batch_of(texts).slice(start)).kept["text"].to_pylist() == once[start:]


def test_only_marked_documents_are_looked_at_in_python(monkeypatch, english_documents):
    def never(*_):
        raise AssertionError("a document without a mark was looked at")

    monkeypatch.setattr("gristmill.stages.pii_secrets._tokens", never)
    assert run(*english_documents, emails=False, ipv4=False) == english_documents


@pytest.mark.parametrize(
    "unit",
    ["AKIA", "ghp_", "github_pat_", "xoxb-1-", "AIza", "sk-", "sk-T3BlbkFJ", "eyJ", "eyJhhhhhhhhhh.", "sk_live_",
     "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "BEGIN ", "-----BEGIN PRIVATE KEY-----\n" + "a" * 40],
)  # fmt: skip
def test_time_is_linear_on_adversarial_text(unit):
    text = "ghp_aaaa " + unit * (1_000_000 // len(unit))
    assert len(run(text, emails=False, ipv4=False)[0]) > 1000
