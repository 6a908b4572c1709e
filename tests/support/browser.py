"""Chromium for the tests of the console, and a console as a process of its own.

Without the browser, the tests are skipped, or fail where CI is set.
"""

import contextlib
import dataclasses
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import uvicorn
from google.cloud.spanner_v1.database import Database
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, expect, sync_playwright
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from outbox.devtools.emulators import Emulators
from outbox_admin import console as console_
from outbox_admin.web.application import Access
from tests.support import real
from tests.support.processes import started
from tests.support.spanner import variables

#: A host name without TLS, which browsers trust less than the loopback address.
HOST = "console.example"
#: What Chromium says about a header at such a host.
IGNORED = "Cross-Origin-Opener-Policy header has been ignored, because the URL's origin was untrustworthy"
#: Debian's, or the one of GitHub's machines.
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", f"--host-resolver-rules=MAP {HOST} 127.0.0.1",
)  # fmt: skip
#: Milliseconds for what a test waits for; other tests share the machine.
TIMEOUT_MS = 30_000
expect.set_options(timeout=TIMEOUT_MS)
WIDE, NARROW = 1_280, 320


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("not in PATH: chromium. apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def running_console(emulators: Emulators, database: Database, *flags: str) -> Iterator[str]:
    """Run `outbox console`, and give its address without the slash at its end."""
    given = emulators.environment() | variables(database.database_id)
    environment = given | real.settings(given)
    with started("outbox", "console", "--bind", "127.0.0.1:0", *flags, environment=environment) as process:
        process.wait_for_text("http://")
        yield process.stdout.strip().removesuffix("/")
        process.end()


@dataclasses.dataclass(slots=True)
class Gate:
    """What protects a console by a login. While it is `closed`, it answers itself, and /login is its page."""

    console: Access
    address: str
    closed: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        login = HTMLResponse("<h1>Please sign in</h1>") if scope.get("path") == "/login" else None
        await (login or self.closed or self.console)(scope, receive, send)


@contextlib.contextmanager
def gated_console(database: Database) -> Iterator[Gate]:
    """Serve a console with actions from a thread of this process, behind a Gate."""
    with gated(console_.app(database, allow_actions=True)) as gate:
        yield gate


@contextlib.contextmanager
def gated(console: Access) -> Iterator[Gate]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gate = Gate(console, f"http://127.0.0.1:{listener.getsockname()[1]}")
        server = uvicorn.Server(uvicorn.Config(gate, log_config=None, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield gate
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@contextlib.contextmanager
def tab(browser: Browser, address: str, *, width: int = WIDE, failures: bool = False, **options: Any) -> Iterator[Page]:
    """Open a tab whose page may neither log an error nor fail, except for `failures` of requests."""
    problems: list[str] = []

    def is_error(message: ConsoleMessage) -> bool:
        expected = any(text in message.text for text in ("status of 404", IGNORED))
        return message.type == "error" and not (failures or expected)

    size: ViewportSize = {"width": width, "height": 800}
    with contextlib.closing(browser.new_context(base_url=address, viewport=size, **options)) as context:
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if is_error(message) else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        yield page
    assert problems == []


def violations(page: Page) -> list[str]:
    """Return what axe-core finds in the page."""
    page.evaluate((resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]


def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))
