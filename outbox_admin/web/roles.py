"""Who sends a request, and what this person may do. There is no session: each request carries its identity."""

import dataclasses
import enum
import functools
import ipaddress
import json
import logging
import re
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import google.auth.exceptions
from google.auth import jwt
from google.auth.transport.requests import Request as HttpRequest
from starlette.requests import Request

from outbox.base.values import json_value
from outbox.errors import SettingError
from outbox_admin.web.console_settings import HEADER, NETWORKS

#: https://cloud.google.com/iap/docs/signed-headers-howto
IAP_HEADER = "X-Goog-IAP-JWT-Assertion"
IAP_ISSUER = "https://cloud.google.com/iap"
IAP_KEYS = "https://www.gstatic.com/iap/verify/public_key"
#: Keys are read again after this time, and before it at most once a minute for an unknown key. Until there are keys, a
#: failed read is repeated sooner.
KEY_SECONDS, UNKNOWN_KEY_SECONDS, FIRST_KEY_SECONDS = 3_600.0, 60.0, 5.0
#: Allowed difference between the clocks of IAP and of this machine.
SKEW_SECONDS = 30

#: One address of an e-mail (RFC 5321 allows 320 characters), or one name. No list of names, and no text around one.
_NAME = re.compile(r"[^\s@,;<>()\"]+(@[^\s@,;<>()\"]+)?")
MAX_NAME = 320
_log = logging.getLogger("outbox")

#: Returns the name of the person who sends a request. Raises Refused.
Identify = Callable[[Request], str]


class Refused(Exception):
    """The answer is a page with this status, what is wrong, and what to do. Access and handlers raise it.

    `field` is the name of the field of a form that has a wrong value. With `wait`, the answer has Retry-After.
    """

    def __init__(self, status: int, title: str, advice: str, field: str = "", *, wait: bool = False) -> None:
        super().__init__(title)
        self.status, self.title, self.advice, self.field, self.wait = status, title, advice, field, wait


class Role(enum.StrEnum):
    """What a person may do. Each route needs one role."""

    VIEWER = "viewer"  # all pages, without message data
    DATA = "data"  # message data; each view is recorded
    OPERATOR = "operator"  # pause, resume, probe, topic controls, retry, resend, restore, stop
    DESTROYER = "destroyer"  # cancel, purge

    @property
    def flag(self) -> str:
        """Return the flag without which no person holds the role."""
        return "--show-data" if self is Role.DATA else "--allow-actions"


#: The roles that change the outbox.
CHANGING = (Role.OPERATOR, Role.DESTROYER)
#: The roles that a role includes. Every role includes the viewer.
_INCLUDED = {Role.DESTROYER: CHANGING}


@dataclasses.dataclass(frozen=True, slots=True)
class Roles:
    """The names of each role, in any case. `*@example.com` is everyone of a domain, `*` everyone with an identity."""

    names: Mapping[Role, tuple[str, ...]]

    def of(self, person: str) -> frozenset[Role]:
        """Return the roles of a person, with those that they include."""
        held = {role for role, patterns in self.names.items() if any(_matches(person, each) for each in patterns)}
        return frozenset(each for role in held for each in (role, Role.VIEWER, *_INCLUDED.get(role, ())))


#: Everyone with an identity may see all pages. `--roles` says more.
VIEWERS = Roles({Role.VIEWER: ("*",)})
#: The person at the loopback address has the credentials of the console anyway.
EVERYTHING = Roles(dict.fromkeys(Role, ("*",)))


def parsed(text: str) -> Roles:
    """Return the roles of a file such as {"viewer": ["*@example.com"]}. Raises SettingError."""
    try:
        return Roles({Role(role): _names(names) for role, names in json_value(text).items()})
    except (ValueError, AttributeError, RecursionError) as error:
        raise SettingError(
            '--roles: the file must be JSON such as {"viewer": ["*@example.com"]}, with the roles '
            f"{', '.join(Role)}: {error}"
        ) from None


class RolesFile:
    """The roles of a file, which is read again when it changes. While it is wrong or missing, the last ones are valid.

    Raises SettingError if the file is wrong at the start.
    """

    def __init__(self, read: Callable[[], str]) -> None:
        self._read, self._text = read, read()
        self._roles = parsed(self._text)
        self._logged = ""  # the error of the last read

    def of(self, person: str) -> frozenset[Role]:
        """Return the roles of a person, with those that they include."""
        try:
            if (text := self._read()) != self._text:
                self._text = text
                self._roles = parsed(text)
            self._logged = ""
        except (SettingError, OSError) as error:
            if str(error) != self._logged:  # once, and not for each request
                self._logged = str(error)
                _log.warning("The roles are not read again, and the last ones stay valid: %s", error)
        return self._roles.of(person)


def _names(value: Any) -> tuple[str, ...]:
    if not (isinstance(value, list) and all(isinstance(name, str) and name for name in value)):
        raise ValueError(f"{value!r:.100} is not a list of names")
    return tuple(value)


def _matches(person: str, pattern: str) -> bool:
    person, pattern = person.lower(), pattern.lower()
    return person.endswith(pattern[1:]) if pattern.startswith("*") else person == pattern


def one_name(name: str) -> str:
    """Return a name. Raises ValueError unless it is the name of one person, in one of its notations."""
    printable = name.isprintable() and unicodedata.is_normalized("NFC", name)
    if len(name) > MAX_NAME or not printable or not _NAME.fullmatch(name):
        raise ValueError(f"{name[:MAX_NAME]!r} is not one address of at most {MAX_NAME} characters")
    return name


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """A header that a proxy sets, in UTF-8, which is believed only if the request comes from one of `proxies`.

    `proxies` are networks, or texts such as 10.0.0.0/8. Raises SettingError.
    """

    header: str
    proxies: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network | str]

    def __post_init__(self) -> None:
        if not HEADER.value(self.header, "header"):
            raise SettingError("header: it is empty. Pass the name of the header that the proxy sets")
        text = self.proxies if isinstance(self.proxies, str) else ",".join(map(str, self.proxies))
        object.__setattr__(self, "proxies", NETWORKS.value(text, "proxies"))

    def __call__(self, request: Request) -> str:
        """Return the value of the header. Raises Refused."""
        names = request.headers.getlist(self.header)
        if not self._is_trusted(request):
            raise Refused(403, "This address is not a trusted proxy", "Open the address of the proxy instead.")
        if len(names) != 1 or not names[0]:
            raise Refused(403, f"The proxy sent no {self.header}", "The proxy must set it once, for each request.")
        try:
            return one_name(names[0].encode("latin-1").decode())  # a server reads each byte of a header as a character
        except ValueError as error:
            advice = f"{self.header} must be one name in UTF-8. The log of the console has the value."
            raise Refused(403, "The proxy did not name one person", advice) from error

    def _is_trusted(self, request: Request) -> bool:
        try:
            address = ipaddress.ip_address(request.client.host if request.client else "")
        except ValueError:
            return False
        # 10.0.0.1 is the same address as ::ffff:10.0.0.1, of a proxy as well as of a network.
        long = address if isinstance(address, ipaddress.IPv6Address) else ipaddress.IPv6Address(f"::ffff:{address}")
        networks: Any = self.proxies
        return any(each in network for network in networks for each in (long, long.ipv4_mapped) if each)


class Keys:
    """The public keys of IAP by key ID, read when a key is unknown. If that fails, the last ones stay valid."""

    def __init__(self, fetch: Callable[[], Mapping[str, str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch, self._clock = fetch, clock
        self._keys: Mapping[str, str] = {}
        self._reading = threading.Lock()
        self._read_at = self._tried_at = float("-inf")

    def with_key(self, id: str) -> Mapping[str, str]:
        """Return the keys, which include the key `id` if IAP has it and can be reached."""
        # A request with a known key does not wait for another thread that reads.
        if self._is_due(id) and self._reading.acquire(blocking=id not in self._keys):
            try:
                if self._is_due(id):
                    self._read()
            finally:
                self._reading.release()
        return self._keys

    def _is_due(self, id: str) -> bool:
        now = self._clock()
        is_old = id not in self._keys or now - self._read_at > KEY_SECONDS
        return is_old and now - self._tried_at > (UNKNOWN_KEY_SECONDS if self._keys else FIRST_KEY_SECONDS)

    def _read(self) -> None:
        try:
            self._keys, self._read_at = self._fetch(), self._clock()
        except (ValueError, google.auth.exceptions.GoogleAuthError, OSError) as error:
            _log.warning("The keys of IAP at %s cannot be read, and the last ones stay valid: %s", IAP_KEYS, error)
        self._tried_at = self._clock()  # not before: requests with a new key wait for the read in progress


def _fetched() -> Mapping[str, str]:
    response = HttpRequest()(IAP_KEYS, timeout=5)
    keys = json.loads(response.data)
    if response.status != 200 or not isinstance(keys, dict) or not keys:
        raise ValueError(f"status {response.status} with {response.data[:100]!r}")
    return keys


@dataclasses.dataclass(frozen=True, slots=True)
class Iap:
    """The assertion of Identity-Aware Proxy for one `audience`: signature, audience, issuer and expiry are checked."""

    audience: str
    keys: Keys = dataclasses.field(default_factory=functools.partial(Keys, _fetched))

    def __post_init__(self) -> None:
        if not self.audience:  # None would mean that each audience is right
            raise SettingError("audience: it is empty. Pass the audience of IAP's assertions")

    def __call__(self, request: Request) -> str:
        """Return the address of the person. Raises Refused."""
        try:
            return self._email(request.headers.get(IAP_HEADER, ""))
        except (ValueError, google.auth.exceptions.GoogleAuthError, OSError) as error:
            advice = "Open the console through Identity-Aware Proxy. The log of the console has the reason."
            raise Refused(403, "IAP did not vouch for this request", advice) from error

    def _email(self, assertion: str) -> str:
        header = jwt.decode_header(assertion)
        if header.get("alg") != "ES256" or not header.get("kid"):
            raise ValueError("the assertion is not signed as IAP signs")
        keys = self.keys.with_key(str(header["kid"]))
        claims: Mapping[str, str] = jwt.decode(
            assertion, keys, audience=self.audience, clock_skew_in_seconds=SKEW_SECONDS
        )
        if claims.get("iss") != IAP_ISSUER or not claims.get("email"):
            raise ValueError("the assertion is not of IAP, or names nobody")
        return one_name(str(claims["email"]))
