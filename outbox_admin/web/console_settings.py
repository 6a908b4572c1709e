"""The settings of the console. `app` accepts the same values."""

import dataclasses
import ipaddress
from typing import Any

from outbox.errors import SettingError
from outbox.program.settings import (
    SWITCH,
    Settings,
    SettingType,
    host_and_port,
    host_name,
    is_loopback,
    matching,
    setting,
)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise ValueError(text)
    return host_and_port(host)[0], int(port)


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(host_name(each.strip()) for each in text.split(","))


def _networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(each.strip()) for each in text.split(",") if each.strip())


HOSTS = SettingType(_hosts, "host names, separated by commas")
NETWORKS = SettingType(_networks, "addresses or networks such as 10.0.0.0/8, separated by commas")
HEADER = matching("[A-Za-z0-9-]*", "a name of a header, or nothing")
TEXT = matching(r"[^\s]*", "text without spaces")
PATH = matching("(/[A-Za-z0-9._~-]+)*", "a path such as /outbox")
DOCS_URL = matching(r"(https?://[^\s\"'<>#?]+(?<!/))?", "an address such as https://example.com/docs, or nothing")
ADDRESS = SettingType(_address, "HOST:PORT or [IPV6]:PORT; port 0 selects a free port")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings(Settings):
    """Where the console listens, and who may do what."""

    bind: tuple[str, int] = setting("127.0.0.1:8080", ADDRESS, "Where the console listens.")
    allow_actions: bool = setting("false", SWITCH, "Let people with the role change the outbox.")
    show_data: bool = setting("false", SWITCH, "Let people with the role read message data. Each view is recorded.")
    iap_audience: str = setting("", TEXT, "With Identity-Aware Proxy, the audience of its assertions.")
    identity_header: str = setting("", HEADER, "With another proxy, the header in which it names the person.")
    trusted_proxy: tuple[Any, ...] = setting("", NETWORKS, "The only addresses whose --identity-header is believed.")
    roles: str = setting(
        "", matching(".*", "a path, or nothing"), "JSON file with the names of each role. Without it, everyone views."
    )
    allowed_hosts: tuple[str, ...] = setting(
        "localhost,127.0.0.1,[::1]", HOSTS, "The host names under which people open the console."
    )
    path_prefix: str = setting("", PATH, "Path of all pages.")
    production: str = setting("", TEXT, "The header is red if the database's full name contains this text.")
    docs_url: str = setting(
        "", DOCS_URL, "Where the folder docs of this project is published. Errors link to its operations/runbook.md."
    )

    def __post_init__(self) -> None:
        if bool(self.identity_header) != bool(self.trusted_proxy):
            raise SettingError("--identity-header and --trusted-proxy need each other. Pass both, or neither")
        if self.iap_audience and self.identity_header:
            raise SettingError("--iap-audience and --identity-header exclude each other. Pass only one of them")
        proxy = (self.iap_audience and "--iap-audience") or (self.identity_header and "--identity-header")
        if not proxy and not is_loopback(self.bind[0]):
            raise SettingError(
                f"--bind {self.bind[0]} can be reached from other machines, so everyone there would be trusted. Pass "
                "--iap-audience, or --identity-header and --trusted-proxy, or bind to 127.0.0.1"
            )
        if proxy and (self.allow_actions or self.show_data) and not self.roles:
            raise SettingError(f"--allow-actions and --show-data need --roles with {proxy}")


#: The settings that `console.app` has, too.
PASSED_ON = ("allow_actions", "show_data", "allowed_hosts", "path_prefix", "production", "docs_url")
