"""Who sends a request. There is no session: each request carries its identity."""

import dataclasses
import functools
import ipaddress
import json
import time
from collections.abc import Callable, Mapping, Sequence

import google.auth.exceptions
from google.auth import jwt
from google.auth.transport.requests import Request as HttpRequest
from starlette.requests import Request

from outbox.console.visits import Refused

#: https://cloud.google.com/iap/docs/signed-headers-howto
IAP_HEADER = "X-Goog-IAP-JWT-Assertion"
IAP_ISSUER = "https://cloud.google.com/iap"
IAP_KEYS = "https://www.gstatic.com/iap/verify/public_key"
#: Keys are read again after this time, and before it at most once a minute for an unknown key.
KEY_SECONDS, UNKNOWN_KEY_SECONDS = 3_600.0, 60.0
#: Allowed difference between the clocks of IAP and of this machine.
SKEW_SECONDS = 30

#: Returns the name of the person who sends a request. Raises Refused.
Identify = Callable[[Request], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """A header that a proxy sets, which is believed only if the request comes from one of `proxies`."""

    header: str
    proxies: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]

    def __call__(self, request: Request) -> str:
        """Return the value of the header. Raises Refused."""
        names = request.headers.getlist(self.header)
        if not self._is_trusted(request):
            raise Refused(403, "This address is not a trusted proxy", "Open the address of the proxy instead.")
        if len(names) != 1 or not names[0]:
            raise Refused(403, f"The proxy sent no {self.header}", "The proxy must set it once, for each request.")
        return names[0]

    def _is_trusted(self, request: Request) -> bool:
        try:
            address = ipaddress.ip_address(request.client.host if request.client else "")
        except ValueError:
            return False
        return any(address in network for network in self.proxies)


class Keys:
    """The public keys of IAP by key ID, read when a key is unknown."""

    def __init__(self, fetch: Callable[[], Mapping[str, str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch, self._clock = fetch, clock
        self._keys: Mapping[str, str] = {}
        self._read_at = float("-inf")

    def with_key(self, id: str) -> Mapping[str, str]:
        """Return the keys, which include the key `id` if IAP has it."""
        age = self._clock() - self._read_at
        if age > KEY_SECONDS or (id not in self._keys and age > UNKNOWN_KEY_SECONDS):
            self._keys, self._read_at = self._fetch(), self._clock()
        return self._keys


def _fetched() -> Mapping[str, str]:
    keys: Mapping[str, str] = json.loads(HttpRequest()(IAP_KEYS, timeout=5).data)
    return keys


@dataclasses.dataclass(frozen=True, slots=True)
class Iap:
    """The assertion of Identity-Aware Proxy for one `audience`: signature, audience, issuer and expiry are checked."""

    audience: str
    keys: Keys = dataclasses.field(default_factory=functools.partial(Keys, _fetched))

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
        return str(claims["email"])
