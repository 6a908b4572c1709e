"""`outbox console`: it is closed unless flags open it, and believes only a trusted proxy."""

import http.client
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import uvicorn
from google.cloud.spanner_v1.database import Database

from outbox.console import command as console
from outbox.console.command import ConsoleSettings
from outbox.devtools.emulators import Emulators
from outbox.errors import SettingError
from tests.support.browser import running_console
from tests.support.commands import Commands

IAP = {"iap_audience": "/projects/1/global/backendServices/2"}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"bind": "0.0.0.0:8080"}, "--bind 0.0.0.0 can be reached from other machines"),
        ({"bind": "[::]:8080"}, "--bind :: can be reached from other machines"),
        ({"bind": "example.com:80"}, "--bind example.com can be reached from other machines"),
        ({"bind": "8080"}, "--bind: '8080' is not allowed"),
        ({"bind": "localhost:\uff18"}, "--bind: 'localhost:\uff18' is not allowed"),
        ({"bind": "localhost:99999"}, "--bind: 'localhost:99999' is not allowed"),
        ({"identity_header": "X-Email"}, "--identity-header and --trusted-proxy need each other"),
        ({"trusted_proxy": "10.0.0.1"}, "--identity-header and --trusted-proxy need each other"),
        (IAP | {"identity_header": "X-Email", "trusted_proxy": "10.0.0.1"}, "exclude each other"),
        ({"trusted_proxy": "10.0.0.1/8"}, "--trusted-proxy: '10.0.0.1/8' is not allowed"),
        (IAP | {"allow_actions": "true"}, "--allow-actions and --show-data need --roles"),
        (IAP | {"show_data": "true"}, "--allow-actions and --show-data need --roles"),
        ({"path_prefix": "outbox"}, "--path-prefix: 'outbox' is not allowed"),
        ({"allowed_hosts": "a b"}, "--allowed-hosts: 'a b' is not allowed"),
    ],
)  # fmt: skip
def test_a_combination_that_would_open_the_console_is_refused(flags: Mapping[str, str], sentence: str) -> None:
    with pytest.raises(SettingError, match=re.escape(sentence)):
        ConsoleSettings.read(flags, {})


def test_the_defaults_are_closed() -> None:
    settings = ConsoleSettings.read({}, {})
    assert (settings.bind, settings.allow_actions, settings.show_data) == (("127.0.0.1", 8080), False, False)
    assert settings.allowed_hosts == ("localhost", "127.0.0.1", "::1")
    assert ConsoleSettings.read(IAP | {"bind": "[::]:80"}, {}).bind == ("::", 80)


def test_faults_of_a_start_are_one_sentence(outbox: Commands, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = outbox.here("console", "--bind", address)
    assert (done.code, done.stderr) == (
        1, f"outbox: cannot listen at 127.0.0.1, port {address[10:]}: Address already in use. Pass another --bind\n",
    )  # fmt: skip
    (tmp_path / "roles.json").write_text("{")
    done = outbox.here("console", "--roles", str(tmp_path / "roles.json"))
    assert done.code == 2
    assert "--roles: the file must be JSON" in done.stderr
    done = outbox.here("console", "--roles", str(tmp_path / "none.json"))
    assert done.code == 2
    assert "cannot be read" in done.stderr


def test_idle_connections_outlast_those_of_a_balancer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's load balancers keep them for 600 s, and lose a request that they send on a closed one."""
    servers: list[uvicorn.Server] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, **_: servers.append(server))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        console._serve(mock.Mock(), listener)
    assert servers[0].config.timeout_keep_alive > 600


def answer(address: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    connection.request("GET", path, headers=dict(headers))
    response = connection.getresponse()
    return response.status, response.read().decode()


@pytest.mark.extended
def test_only_a_trusted_proxy_names_a_person(emulators: Emulators, database: Database, tmp_path: Path) -> None:
    """Whatever X-Forwarded-For says: uvicorn could take it for the address of the client."""
    roles = tmp_path / "roles.json"
    roles.write_text(json.dumps({"operator": ["ann@example.com"]}))
    flags = ("--identity-header", "X-Email", "--roles", str(roles), "--path-prefix", "/outbox")
    ann = {"X-Email": "ann@example.com", "X-Forwarded-For": "10.0.0.1", "Forwarded": "for=10.0.0.1"}
    with running_console(emulators, database, *flags, "--trusted-proxy", "10.0.0.0/8") as address:
        host = address.removesuffix("/outbox")
        assert answer(host, "/outbox/", ann)[0] == 403
        assert answer(host, "/outbox/healthz", {"Host": "10.4.0.7:8080"}) == (200, "ok\n")
    with running_console(emulators, database, *flags, "--trusted-proxy", "127.0.0.1") as address:
        host = address.removesuffix("/outbox")
        status, page = answer(host, "/outbox/", ann)
        assert status == 200
        assert "ann@example.com (viewer)" in page
        assert 'href="/outbox/workers"' in page
        assert answer(host, "/outbox/", {"X-Email": "eve@example.com"})[0] == 403
        assert answer(host, "/outbox/", {"X-Email": "eve@example.com, ann@example.com"})[0] == 403
        handshake = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        assert answer(host, "/outbox/", handshake | {"Sec-WebSocket-Key": "x" * 22 + "=="})[0] == 403
        assert answer(host, "/outbox/", {})[0] == 403
