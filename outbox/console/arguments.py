"""The values that the command and `app` accept. Pure, standard library only."""

import ipaddress

from outbox.program.settings import SettingType, host_name, matching


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(host_name(each.strip()) for each in text.split(","))


def _networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(each.strip()) for each in text.split(",") if each.strip())


HOSTS = SettingType(_hosts, "host names, separated by commas")
NETWORKS = SettingType(_networks, "addresses or networks such as 10.0.0.0/8, separated by commas")
HEADER = matching("[A-Za-z0-9-]*", "a name of a header, or nothing")
TEXT = matching(r"[^\s]*", "text without spaces")
PATH = matching("(/[A-Za-z0-9._~-]+)*", "a path such as /outbox")
#: An address in which names in braces are replaced by values.
TEMPLATE = matching(r"(https?://[^\s\"'<>]+)?", "an address such as https://example.com/outbox?topic={topic}")
DOCS_URL = matching(r"(https?://[^\s\"'<>#?]+(?<!/))?", "an address such as https://example.com/docs, or nothing")
