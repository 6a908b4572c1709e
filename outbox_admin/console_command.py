"""`outbox console`: the outbox in a browser."""

import argparse
import os
import signal
import socket
from functools import partial
from typing import Any

from outbox.base.start import exit_on, install, need
from outbox.errors import OutboxError
from outbox.program import logs
from outbox.program.settings import DatabaseSettings
from outbox.program.terminal import note, say
from outbox_admin import flags
from outbox_admin.web.console_settings import PASSED_ON, ConsoleSettings

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


def add(commands: Any) -> None:
    parser = flags.command(commands, "console", "serve the outbox to a browser", DESCRIPTION, _run_console)
    ConsoleSettings.add_flags(parser)


def _run_console(options: argparse.Namespace) -> None:
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
    from outbox.table.connection import open_database  # noqa: PLC0415 - the client: half a second
    from outbox_admin import console  # noqa: PLC0415 - optional
    from outbox_admin.web.roles import RolesFile, parsed  # noqa: PLC0415 - optional

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
        why = (error.strerror or str(error)).partition(" (while")[0]  # Python adds the address
        raise OutboxError(f"cannot listen at {host}, port {port}: {why}. Pass another --bind") from None
