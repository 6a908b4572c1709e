"""Who sends a request: assertions of IAP, the header of a trusted proxy, and the file of roles."""

import base64
import concurrent.futures
import ipaddress
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import google.auth.exceptions
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.auth import jwt
from google.auth.crypt import es
from starlette.requests import Request

from outbox.errors import SettingError
from outbox_admin.web import roles
from outbox_admin.web.roles import (
    FIRST_KEY_SECONDS,
    IAP_HEADER,
    IAP_ISSUER,
    KEY_SECONDS,
    UNKNOWN_KEY_SECONDS,
    Header,
    Iap,
    Keys,
    Refused,
    Role,
    parsed,
)
from tests.support.waiting import eventually

AUDIENCE = "/projects/1/global/backendServices/2"


def request(headers: Mapping[str, str] | list[tuple[str, str]], client: str = "10.0.0.1") -> Request:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs]
    return Request({"type": "http", "headers": raw, "client": (client, 1234), "method": "GET", "path": "/"})


def key_pair(private: Any) -> tuple[bytes, str]:
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem, public.decode()


PRIVATE, PUBLIC = key_pair(ec.generate_private_key(ec.SECP256R1()))
OTHER, OTHER_PUBLIC = key_pair(ec.generate_private_key(ec.SECP256R1()))


def assertion(key: bytes = PRIVATE, id: str = "k1", **claims: Any) -> str:
    now = int(time.time())
    usual = {"iss": IAP_ISSUER, "aud": AUDIENCE, "email": "ann@example.com", "iat": now, "exp": now + 86_400}
    signer = es.EsSigner.from_string(key, id)
    return jwt.encode(signer, {name: value for name, value in (usual | claims).items() if value is not None}).decode()


def iap(keys: Mapping[str, str] | None = None) -> Iap:
    return Iap(AUDIENCE, Keys(lambda: keys or {"k1": PUBLIC, "k2": OTHER_PUBLIC}))


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


NOW = int(time.time())
VALID = assertion().split(".")
UNSIGNED = f"{part({'alg': 'none', 'kid': 'k1'})}.{VALID[1]}."
#: The public key as the secret of a symmetric signature, which a careless verifier accepts.
SYMMETRIC = f"{part({'alg': 'HS256', 'kid': 'k1'})}.{VALID[1]}.{VALID[2]}"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="none"),
        pytest.param("a.b.c", id="no base64"),
        pytest.param(f"{part({'alg': 'ES256', 'kid': {}})}.{VALID[1]}.{VALID[2]}", id="strange key ID"),
        pytest.param(UNSIGNED, id="unsigned"),
        pytest.param(SYMMETRIC, id="symmetric"),
        pytest.param(assertion(OTHER), id="another key"),
        pytest.param(assertion(id="k9"), id="unknown key"),
        pytest.param(assertion(id="k2"), id="the ID of another key"),
        pytest.param(".".join([VALID[0], part({"email": "eve@example.com"}), VALID[2]]), id="other claims"),
        pytest.param(assertion(aud="/projects/1/global/backendServices/3"), id="another audience"),
        pytest.param(assertion(aud=None), id="no audience"),
        pytest.param(assertion(iss="https://accounts.google.com"), id="another issuer"),
        pytest.param(assertion(email=None), id="nobody"),
        pytest.param(assertion(iat=NOW - 700, exp=NOW - 100), id="expired"),
        pytest.param(assertion(iat=NOW + 86_400, exp=NOW + 90_000), id="from the future"),
        pytest.param(assertion(exp=None), id="never expires"),
    ],
)
def test_no_other_assertion_names_anyone(text: str) -> None:
    with pytest.raises(Refused, match="IAP did not vouch"):
        iap()(request({IAP_HEADER: text} if text else {}))


def test_unknown_keys_cause_one_read_a_minute_whatever_its_result() -> None:
    """Also if many threads ask at once."""
    now, reads = [0.0], list[float]()

    def fetch() -> dict[str, str]:
        reads.append(now[0])
        if len(reads) > 1:
            raise OSError("no route")
        return {"k1": PUBLIC}

    keys = Keys(fetch, lambda: now[0])
    for second in (0.0, UNKNOWN_KEY_SECONDS + 1):
        now[0] = second
        with concurrent.futures.ThreadPoolExecutor(10) as threads:
            list(threads.map(keys.with_key, (f"forged {number}" for number in range(50))))
    assert reads == [0.0, UNKNOWN_KEY_SECONDS + 1]


def test_requests_with_a_new_key_wait_for_the_read_in_progress() -> None:
    """After a start, and when IAP has a new key, a page and its tabs send many requests at once."""
    may_end = threading.Event()

    def fetch() -> dict[str, str]:
        assert may_end.wait(10)
        return {"k1": PUBLIC}

    reader = Keys(fetch)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(reader.with_key, "k1")
        eventually(reader._reading.locked, seconds=5)
        second = threads.submit(reader.with_key, "k1")
        with pytest.raises(TimeoutError):
            second.result(0.1)
        may_end.set()
        assert first.result() == second.result() == {"k1": PUBLIC}


def test_keys_are_read_again_when_they_are_old_and_stay_valid_if_that_fails() -> None:
    now = [0.0]
    fetch = mock.Mock(return_value={"k1": PUBLIC})
    named = Iap(AUDIENCE, Keys(fetch, lambda: now[0]))
    for error in (None, OSError("no route"), ValueError("status 500"), google.auth.exceptions.TransportError("reset")):
        fetch.side_effect = error
        for _ in range(2):
            assert named(request({IAP_HEADER: assertion()})) == "ann@example.com"
        now[0] += KEY_SECONDS + 1
    assert fetch.call_count == 4


def test_a_console_that_starts_without_the_key_server_opens_soon_after_it_is_back() -> None:
    now = [0.0]
    fetch = mock.Mock(side_effect=OSError("no route"))
    named = Iap(AUDIENCE, Keys(fetch, lambda: now[0]))
    for _ in range(2):
        with pytest.raises(Refused, match="IAP did not vouch"):
            named(request({IAP_HEADER: assertion()}))
    assert fetch.call_count == 1
    now[0], fetch.side_effect, fetch.return_value = FIRST_KEY_SECONDS + 1, None, {"k1": PUBLIC}
    assert named(request({IAP_HEADER: assertion()})) == "ann@example.com"


@pytest.mark.parametrize(("status", "body"), [(500, b"{}"), (404, b'{"error": "x"}'), (200, b"[]"), (200, b"<html>")])
def test_only_an_answer_with_keys_is_keys(status: int, body: bytes) -> None:
    answer = mock.Mock(status=status, data=body)
    with (
        mock.patch.object(roles, "HttpRequest", return_value=lambda *_, **__: answer),
        pytest.raises(ValueError, match=r"status|Expecting"),
    ):
        roles._fetched()


PROXY = Header("X-Forwarded-Email", ["10.0.0.0/8", "fd00::/8"])


@pytest.mark.parametrize("proxies", ["10.0.0.0/8,fd00::/8", ["::ffff:10.0.0.0/104", ipaddress.ip_network("fd00::/8")]])
@pytest.mark.parametrize("client", ["10.1.2.3", "fd00::1", "::ffff:10.1.2.3", "::ffff:a01:203", "fd00::1%eth0"])
def test_the_header_of_a_trusted_proxy_names_the_person(proxies: Any, client: str) -> None:
    """Whatever the notation of its address: a socket for IPv6 shows an IPv4 address as ::ffff:10.1.2.3."""
    proxy = Header("X-Forwarded-Email", proxies)
    assert proxy(request({"x-forwarded-email": "bob@example.com"}, client)) == "bob@example.com"


@pytest.mark.parametrize("client", ["11.0.0.1", "127.0.0.1", "::ffff:11.0.0.1", "testclient", ""])
def test_the_header_of_another_address_names_nobody(client: str) -> None:
    spoofed = {"X-Forwarded-Email": "bob@example.com", "X-Forwarded-For": "10.0.0.1", "Forwarded": "for=10.0.0.1"}
    with pytest.raises(Refused, match="not a trusted proxy"):
        PROXY(request(spoofed, client))


@pytest.mark.parametrize("values", [[], [""], ["bob@example.com", "eve@example.com"]])
def test_the_proxy_sets_the_header_once(values: list[str]) -> None:
    with pytest.raises(Refused, match="The proxy sent no X-Forwarded-Email"):
        PROXY(request([("X-Forwarded-Email", value) for value in values]))


@pytest.mark.parametrize("name", ["jörg", "jörg@example.com", "ann+ops@example.com", "o'hara@example.com", "x" * 320])
def test_a_name_is_utf8(name: str) -> None:
    assert PROXY(request({"X-Forwarded-Email": name.encode().decode("latin-1")})) == name


NOT_ONE = (
    "evil@evil.com, vi@example.com", "evil@evil.com;vi@example.com", "evil@evil.com vi@example.com",
    "evil@evil.com\tvi@example.com", "Vi <vi@example.com>", '"evil@evil.com"@example.com', "evil@evil.com@example.com",
    "@example.com", "vi@", "x" * 309 + "@example.com", "jo\u0308rg@example.com", "\u212aai@example.com",
    "vi\u200b@example.com", "vi\u202e@example.com", "evil@evil.com\x85vi@example.com", "j\udcf6rg",
)  # fmt: skip


def test_a_header_names_one_person_in_one_notation_of_utf8() -> None:
    for name in NOT_ONE:
        with pytest.raises(Refused, match="The proxy did not name one person"):
            PROXY(request({"X-Forwarded-Email": name.encode(errors="surrogateescape").decode("latin-1")}))


@pytest.mark.parametrize("wrong", [lambda: Header("", []), lambda: Header("X-Email", "10.0.0.1/8"), lambda: Iap("")])
def test_an_identity_without_its_check_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(SettingError):
        wrong()


def test_the_file_of_roles() -> None:
    roles = parsed('{"viewer": ["*@example.com"], "destroyer": ["ann@example.com"], "data": ["eve@other.org"]}')
    assert roles.of("ann@example.com") == {Role.VIEWER, Role.OPERATOR, Role.DESTROYER}
    assert roles.of("bob@example.com") == roles.of("joann@example.com") == {Role.VIEWER}
    assert roles.of("ANN@Example.COM") == roles.of("ann@example.com")
    assert parsed('{"data": ["JÖRG@Example.com"]}').of("jörg@example.com") == {Role.VIEWER, Role.DATA}
    assert roles.of("eve@other.org") == {Role.VIEWER, Role.DATA}
    for nobody in ("", "example.com", "ann@example.com.evil.org", "*@example.com.evil", "ANN@example.com "):
        assert roles.of(nobody) == set()


def test_a_wrong_file_of_roles_is_refused() -> None:
    lists = ('{"admin": []}', '{"viewer": "*"}', '{"viewer": [1]}', '{"viewer": [""]}', '{"data": [], "data": []}')
    for text in ("", "[]", *lists):
        with pytest.raises(SettingError, match="--roles: the file must be JSON such as"):
            parsed(text)
