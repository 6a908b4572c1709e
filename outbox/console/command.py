"""`outbox console`: the outbox in a browser."""

import argparse
import dataclasses
import ipaddress
import os
import signal
import socket
from functools import partial
from typing import Any

from outbox import console
from outbox.admin import flags
from outbox.base.start import exit_on, install, need
from outbox.errors import OutboxError, SettingError
from outbox.program import logs
from outbox.program.settings import (
    SWITCH,
    DatabaseSettings,
    Settings,
    SettingType,
    host_and_port,
    host_name,
    is_loopback,
    matching,
    setting,
)
from outbox.program.terminal import note, say

#: Longer than Google's load balancers keep an idle connection, 600 s, so that none of them uses one that is closed.
KEEP_ALIVE_SECONDS = 620
DESCRIPTION = """\
Serve the outbox to a browser until Ctrl-C or SIGTERM: backlog, tasks, workers, blocked keys
and operations. It needs the extra spanner-outbox[console]. On this machine it needs no
login, and it changes nothing unless you pass --allow-actions.

    outbox console --project my-project --instance main --database shop
    outbox console --allow-actions --production shop-prod ...
    outbox console --bind 0.0.0.0:8080 --iap-audience /projects/1/... \\
        --roles roles.json --allowed-hosts outbox.example.com ..."""


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise ValueError(text)
    return host_and_port(host)[0], int(port)


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(host_name(each.strip()) for each in text.split(","))


def _networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(each.strip()) for each in text.split(",") if each.strip())


# `app` accepts the same values.
HOSTS = SettingType(_hosts, "host names, separated by commas")
NETWORKS = SettingType(_networks, "addresses or networks such as 10.0.0.0/8, separated by commas")
HEADER = matching("[A-Za-z0-9-]*", "a name of a header, or nothing")
TEXT = matching(r"[^\s]*", "text without spaces")
PATH = matching("(/[A-Za-z0-9._~-]+)*", "a path such as /outbox")
#: An address in which names in braces are replaced by values.
TEMPLATE = matching(r"(https?://[^\s\"'<>]+)?", "an address such as https://example.com/outbox?topic={topic}")
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
    dashboard_url: str = setting(
        "", TEMPLATE, "Your dashboard. The page of a topic links to it. {topic} and {time} (RFC 3339) are replaced."
    )
    trace_url: str = setting("", TEMPLATE, "Your page of traces instead of Cloud Trace. {trace} is replaced.")

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
PASSED_ON = (
    "allow_actions", "show_data", "allowed_hosts", "path_prefix", "production", "docs_url", "dashboard_url",
    "trace_url",
)  # fmt: skip


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "console", "serve the outbox to a browser", DESCRIPTION, run)
    ConsoleSettings.add_flags(parser)


def run(options: argparse.Namespace) -> None:
    """Serve until a signal. Raises SettingError, NotReached, OutboxError."""
    settings, database = ConsoleSettings.read(vars(options)), DatabaseSettings.read(vars(options))
    try:
        application = _application(settings, database)
    except ModuleNotFoundError as error:
        raise OutboxError(f"the console needs {error.name}: {install('console')}") from None
    with _listening(*settings.bind) as listener, exit_on(signal.SIGTERM, signal.SIGINT, code=0):
        host, port = listener.getsockname()[:2]
        say(f"http://{f'[{host}]' if ':' in host else host}:{port}{settings.path_prefix}/")
        actions = "actions are allowed" if settings.allow_actions else "read-only"
        note(f"the console is running, {actions}. Press Ctrl-C to stop it")
        _serve(application, listener)


def _serve(application: Any, listener: socket.socket) -> None:
    import uvicorn  # noqa: PLC0415 - optional

    logs.configure(os.environ.get("OUTBOX_LOG_FORMAT") or "auto")
    # proxy_headers would let any client choose the address that --trusted-proxy is compared with.
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="off", proxy_headers=False, server_header=False,
        ws="none", timeout_graceful_shutdown=5, timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listener])


def _application(settings: ConsoleSettings, database: DatabaseSettings) -> Any:
    need("uvicorn", "the console", "console")
    from outbox.console.roles import RolesFile, parsed  # noqa: PLC0415 - optional
    from outbox.table.connection import open_database  # noqa: PLC0415 - the client: half a second

    identify: Any = None
    if settings.iap_audience:
        identify = console.Iap(settings.iap_audience)
    elif settings.identity_header:
        identify = console.Header(settings.identity_header, settings.trusted_proxy)
    roles: Any = None
    if settings.roles:
        read = partial(flags.read_text, settings.roles, "--roles: ")
        roles = parsed(read()) if settings.roles == "-" else RolesFile(read)
    others: dict[str, Any] = {name: getattr(settings, name) for name in PASSED_ON}
    return console.app(open_database(database), identify=identify, roles=roles, **others)


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise OutboxError(f"cannot listen at {host}, port {port}: {why}. Pass another --bind") from None
