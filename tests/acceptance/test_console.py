"""`outbox console` as a process and in a browser: closed by default, widths, colors, keys, live update."""

import dataclasses
import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import anyio
import pytest
import uvicorn
from google.cloud.spanner_v1.database import Database
from playwright.sync_api import Browser, expect
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import outbox_admin as admin
from outbox.devtools.emulators import Emulators
from outbox.errors import OutboxError, SettingError
from outbox.rows.task_table import TaskTable
from outbox.table.states import NEVER
from outbox_admin import console_command as console
from outbox_admin.console import routes
from outbox_admin.tasks.lookup import BlockedHead, ErrorCount, Task
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.web.application import HEADERS
from outbox_admin.web.console_settings import ConsoleSettings
from outbox_admin.web.visits import Shared
from tests.support.browser import (
    HOST,
    NARROW,
    WIDE,
    chromium,
    gated,
    gated_console,
    overflow,
    running_console,
    tab,
    violations,
)
from tests.support.commands import Commands
from tests.support.console import NOW, ago, bare_access, bare_console, crowded, worker
from tests.support.operations import FUTURE, insert, opened, row, rows_of
from tests.support.waiting import eventually

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


def test_an_error_about_two_settings_names_the_variable_of_a_value_that_a_variable_has() -> None:
    sentence = "^--identity-header and OUTBOX_TRUSTED_PROXY need each other"
    with pytest.raises(SettingError, match=sentence):
        ConsoleSettings.read({}, {"OUTBOX_TRUSTED_PROXY": "10.0.0.1"})


def test_the_defaults_are_closed() -> None:
    settings = ConsoleSettings.read({}, {})
    assert (settings.bind, settings.allow_actions, settings.show_data) == (("127.0.0.1", 8080), False, False)
    assert settings.allowed_hosts == ("localhost", "127.0.0.1", "::1")
    assert ConsoleSettings.read(IAP | {"bind": "[::]:80"}, {}).bind == ("::", 80)


def test_faults_of_a_start_are_one_sentence(outbox: Commands, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = outbox.here("console", "--bind", address)
    sentence = f"cannot listen at 127.0.0.1, port {address[10:]}: Address already in use. Pass another --bind"
    assert (done.code, json.loads(done.stderr)["message"]) == (1, sentence)
    with pytest.raises(OutboxError, match=r"^cannot listen at no-host.invalid, port 80: [^(]*not known. Pass"):
        console._listening("no-host.invalid", 80)
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


#: Lets a page ask for the current figures, instead of some seconds later.
ASK = "document.dispatchEvent(new Event('visibilitychange'))"
#: The ID of an operation.
STOPPED = "00000000-0000-4000-8000-000000000001"
PAGES = (
    "/", "/?topics=1", "/topic?name=orders", "/tasks", "/tasks?state=sent&follow=1", "/tasks?order=oldest",
    "/tasks?state=blocked&topic=orders&since=9d", "/tasks/retry?state=dead",
    "/tasks/cancel?id=head", "/tasks/resend?topic=orders", "/task?id=b1", "/operations", f"/operation?id={STOPPED}",
    "/blocked", "/workers", "/search?q=orders", f"/search?q={32 * 'a'}", "/search", "/none",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


def fill(database: Database) -> None:
    """Insert tasks of several states, and one with a name that is hard to lay out."""
    long = "x" * 300
    rows = [row(f"dead {n}", AvailableAt=NEVER, LastError=f"not_found: {long}") for n in range(3)]
    rows += [row("head", OrderingKey="order-31", AvailableAt=NEVER, LastError="permission_denied: 403")]
    rows += [row(f"b{n}", OrderingKey="order-31", AvailableAt=FUTURE, BlockedBy="head") for n in range(4)]
    insert(database, [*rows, row("long", Topic=long), row("markup", Topic="<script>alert(1)</script>")])
    table, author = TaskTable(opened(database)), admin.operations.Author("jane@example.com", long)
    admin.execution.begin(table, "retry", TaskSelection(state="dead", topic=long), author, id=STOPPED, selected=9)
    admin.operations.stop(table, STOPPED, author)


def test_an_operator_retries_a_dead_task_and_cancels_all_matching(
    emulators: Emulators, database: Database, browser: Browser
) -> None:
    """From the overview, with links and forms only.

    Under the name of a host without TLS, to which a browser sends no Sec-Fetch-Site.
    """
    insert(database, [row(f"dead {n}", AvailableAt=NEVER, LastError="not_found: 404") for n in range(3)])
    table = TaskTable(opened(database))
    named = ("--allow-actions", "--allowed-hosts", HOST)
    with (
        running_console(emulators, database, *named) as address,
        tab(browser, address.replace("127.0.0.1", HOST)) as page,
    ):
        page.goto("/")
        page.get_by_role("link", name="not_found: 404").click()
        page.get_by_role("link", name="dead 1").click()
        page.get_by_role("link", name="Retry this task").click()
        expect(page.locator("main")).to_contain_text("Nothing has been changed yet")
        page.get_by_label("Reason").fill("the topic exists")
        page.get_by_role("button", name="Retry 1 task").click()
        expect(page.get_by_role("heading", name="Operation: retry")).to_be_visible()
        eventually(lambda: rows_of(database)["dead 1"]["AvailableAt"] != NEVER)
        page.goto("/tasks?state=dead")
        page.get_by_role("link", name="Cancel all matching").click()
        page.get_by_label("Type 2 to confirm").fill("2")
        page.get_by_label("Reason").fill("no longer needed")
        page.get_by_role("button", name="Cancel 2 tasks").click()
        expect(page.get_by_role("heading", name="Operation: cancel")).to_be_visible()
        eventually(lambda: [id for id, each in rows_of(database).items() if not each["CancelledBy"]] == ["dead 1"])
    found = [(each.operation, each.reason) for each in admin.operations.latest(table, 5)]
    assert found == [("cancel", "no longer needed"), ("retry", "the topic exists")]


@pytest.mark.extended
@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_every_page_is_accessible_and_fits(
    emulators: Emulators, database: Database, browser: Browser, width: int, scheme: str
) -> None:
    fill(database)
    flags = ("--allow-actions", "--production", "test")
    with (
        running_console(emulators, database, *flags) as address,
        tab(browser, address, width=width, color_scheme=scheme) as page,
    ):
        for path in PAGES:
            page.goto(path)
            for folded in (*page.locator("label.fold:visible").all(), *page.locator("summary:visible").all()):
                folded.click()
            assert overflow(page) <= 0, path
            assert violations(page) == [], path


@pytest.mark.extended
def test_every_page_works_without_javascript(emulators: Emulators, database: Database, browser: Browser) -> None:
    fill(database)
    with (
        running_console(emulators, database, "--allow-actions") as address,
        tab(browser, address, java_script_enabled=False, failures=True) as page,
    ):
        for path in PAGES:
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.goto("/")
        page.get_by_role("searchbox").fill("head")
        page.get_by_role("button", name="Search").click()
        page.goto("/topic?name=orders")
        page.get_by_text("Limits, route and retry policy").click()
        page.get_by_label("Tasks a second").fill("10")
        page.get_by_label("Tasks that may be sent at once").fill("20")
        page.get_by_role("button", name="Preview the change").click()
        page.get_by_role("button", name="Write the controls").click()
        expect(page.locator("main")).to_contain_text("at most 10 tasks a second, 20 at once")
        page.get_by_text("Limits, route and retry policy").click()
        page.get_by_label("Max time between two attempts").fill("soon")
        page.get_by_role("button", name="Preview the change").click()
        expect(page.get_by_label("Max time between two attempts")).to_have_value("soon")
        expect(page.locator("label:has([aria-invalid])")).to_contain_text("'soon' is not allowed. It must be seconds")
        page.goto(page.url)  # the address of the refused form
        expect(page).to_have_url(f"{address}/topic?name=orders")


@pytest.mark.extended
def test_keys_open_pages_and_the_search(emulators: Emulators, database: Database, browser: Browser) -> None:
    fill(database)
    with running_console(emulators, database) as address, tab(browser, address) as page:
        page.goto("/blocked")
        page.keyboard.press("g")
        page.keyboard.press("w")
        page.wait_for_url(f"{address}/workers")  # and until its script is loaded
        page.keyboard.press("g")
        page.keyboard.press("o")
        page.wait_for_url(f"{address}/")
        page.keyboard.press("/")
        page.keyboard.type("long")  # no key of these is a shortcut in the box
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{address}/task?id=long")


@pytest.mark.extended
def test_a_visible_tab_is_up_to_date_and_a_hidden_one_asks_nothing(
    emulators: Emulators, database: Database, browser: Browser
) -> None:
    with running_console(emulators, database) as address, tab(browser, address) as page:
        page.clock.install()
        page.goto("/tasks?state=sent&follow=1")
        insert(database, [row("sent", SentAt=datetime.now(UTC) - timedelta(seconds=1))])
        expect(page.get_by_role("link", name="sent", exact=True)).to_have_count(2)  # the tab of the state, and the task
        page.goto("/topic?name=orders")
        insert(database, [row(f"t{n}") for n in range(7)])
        expect(page.locator("#live")).to_contain_text("7")
        page.evaluate("Object.defineProperty(document, 'visibilityState', {value: 'hidden', configurable: true})")
        page.wait_for_timeout(1_000)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.fast_forward(11_000)
        page.wait_for_timeout(1_000)
        assert asked == []


@pytest.mark.extended
def test_all_times_of_a_page_are_in_the_zone_that_it_names(
    emulators: Emulators, database: Database, browser: Browser
) -> None:
    """Fields of forms take what their labels say. A time that is only hour and minute has a zone above it."""
    fill(database)
    clocks = re.compile(r"(?<!T)\d\d:\d\d:\d\d(?! Asia/Tokyo)")  # commands have RFC 3339
    with (
        running_console(emulators, database, "--allow-actions") as address,
        tab(browser, address, timezone_id="Asia/Tokyo") as page,
    ):
        page.goto("/")
        expect(page.locator(".as-of")).to_contain_text(" UTC")
        expect(page.locator("#live [data-zone]")).to_have_text("UTC")
        page.get_by_role("button", name="Show local times").click()
        for path in PAGES[:-1]:
            page.goto(path)
            expect(page.locator("footer [data-zone]")).to_have_text("Asia/Tokyo")
            assert not clocks.search(page.locator("main").inner_text()), path
        page.goto("/tasks?state=dead")
        page.get_by_label("Until (UTC)").fill("2026-01-01 00:00:00")  # when the tasks were registered
        page.get_by_role("button", name="Filter").click()
        expect(page.locator("main")).to_contain_text("No dead task matches")
        page.get_by_label("Until (UTC)").fill("2026-01-01 00:00:01")
        page.get_by_role("button", name="Filter").click()
        expect(page.get_by_role("link", name="dead 1")).to_be_visible()
        page.get_by_role("button", name="Show times in UTC").click()
        expect(page.locator("main")).not_to_contain_text("Asia/Tokyo")


#: The longest names that Google Cloud allows.
LONGEST = f"projects/{'p' * 30}/instances/{'i' * 64}/databases/{'d' * 30}"


@pytest.mark.extended
@pytest.mark.parametrize("width", [390, 1_280])
def test_a_header_names_the_database_in_full_and_200_topics_fit_three_screens_of_a_phone(
    browser: Browser, width: int
) -> None:
    """The person yields. What a phone does not show is counted, and can be opened without a script, as are the actions.

    A worker that differs from the others comes first. Buttons are as high as a finger needs.
    """
    refused = "permission_denied: 403 User not authorized to perform this action"
    errors = [ErrorCount({"a": 2, "b": 1}, "dead", f"{refused}: {n}", 3, False, ago(90), ago(30)) for n in range(22)]
    columns = {"Topic": "topic-001", "OrderingKey": "customer", "CreatedAt": ago(90), "LastError": refused}
    blocked = [BlockedHead(f"head-{n}", "topic-001", 2, Task("dead", columns, NOW)) for n in range(90)]
    figures = dataclasses.replace(crowded(), errors=errors, blocked=blocked)
    figures.backlog.workers.append(worker("odd", version="2"))
    status = Shared(lambda _last: figures)
    shared = bare_console(status=status, is_production=True)
    shared.table.name = LONGEST
    console = bare_access(routes(), shared, identify=lambda _request: f"{'person' * 9}@example.com")
    with gated(console) as gate, tab(browser, gate.address, width=width, java_script_enabled=False) as page:
        for path in ("/", "/?topics=1", "/workers", "/blocked", "/operations", "/topic?name=topic-001"):
            page.goto(path)
            database = page.locator("header .database")
            expect(database).to_have_text(f"{'p' * 30}/{'i' * 64}/{'d' * 30}")
            assert database.evaluate("each => each.scrollWidth <= each.clientWidth"), "no part is cut"
            assert overflow(page) <= 0
            if width == 390:
                assert page.evaluate("document.documentElement.scrollHeight") <= 3 * 844, path
        if width == 390:
            page.goto("/")
            for label, each in (("more problems", ".problem-card"), ("more groups", "#more-group + * tbody tr")):
                before = page.locator(f"{each}:visible").count()
                page.locator("label", has_text=label).click()
                assert page.locator(f"{each}:visible").count() > before
            expect(page.locator("svg.plot").first).to_be_hidden()
            page.get_by_text("Show the charts").click()
            expect(page.locator("svg.plot").first).to_be_visible()
            page.goto("/workers")
            expect(page.locator("tbody th.id").first).to_have_text("odd")
            page.goto("/topic?name=topic-001")
            expect(page.get_by_role("button", name="Pause")).to_be_hidden()
            page.locator("label", has_text="Actions").click()
            for button in page.locator(".sheet :is(button, summary):visible").all():
                assert (button.bounding_box() or {})["height"] >= 44
            expect(page.get_by_role("button", name="Pause")).to_be_in_viewport()


@pytest.mark.extended
def test_a_chart_says_the_values_below_the_pointer_or_the_cursor(database: Database, browser: Browser) -> None:
    """Also after the page was read again."""
    fill(database)
    with gated_console(opened(database)) as gate, tab(browser, gate.address) as page:
        page.goto("/")
        plot, output = page.locator("svg.plot").first, page.locator("figure output").first
        plot.hover()
        expect(output).to_contain_text(re.compile("^[0-9]{2}:[0-9]{2} UTC: registered [0-9,\u2013]+ · published"))
        page.mouse.move(1, 1)
        expect(output).to_be_empty()
        plot.focus()
        page.keyboard.press("ArrowLeft")
        last = str(output.text_content())
        page.keyboard.press("ArrowLeft")
        expect(output).not_to_have_text(last)
        before = str(output.text_content())
        page.evaluate("refresh()")
        expect(output).to_have_text(before)
        page.keyboard.press("ArrowRight")
        expect(output).to_have_text(last)


@pytest.mark.extended
def test_a_problem_is_in_the_title_and_read_out_once(database: Database, browser: Browser) -> None:
    """Not with each refresh, although the sentence has an age. A page that is still keeps its own title."""
    with gated_console(opened(database)) as gate, tab(browser, gate.address, failures=True) as page:
        page.goto("/tasks?state=dead")
        expect(page).to_have_title("1 problem · Tasks: dead · Outbox")  # no worker
        insert(database, [row("pending", CreatedAt=datetime.now(UTC))])
        expect(page.locator("#health")).to_contain_text("Pending: 1 task")
        expect(page.locator("#changed")).to_be_empty()
        insert(database, [row("dead", AvailableAt=NEVER)])
        expect(page.locator("#changed")).to_contain_text("Pending: 1 task. And 1 more problem")
        page.locator("#changed").evaluate("element => element.textContent = ''")
        insert(database, [row("second", CreatedAt=datetime.now(UTC))])
        expect(page.locator("#health")).to_contain_text("Pending: 2 tasks")
        expect(page.locator("#changed")).to_be_empty()
        gate.closed = HTMLResponse("bad gateway", 502)
        expect(page).to_have_title("Not current · Tasks: dead · Outbox")


@pytest.mark.extended
def test_a_page_of_tasks_keeps_what_a_person_selects(
    emulators: Emulators, database: Database, browser: Browser
) -> None:
    """Only its health sentence is up to date, which costs no read of its own."""
    insert(database, [row(f"dead {n}", AvailableAt=NEVER) for n in range(3)])
    with running_console(emulators, database) as address, tab(browser, address) as page:
        page.goto("/tasks?state=dead")
        page.get_by_label("Select dead 1").check()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        insert(database, [row("new dead", AvailableAt=NEVER), *(row(f"t{n}") for n in range(7))])
        expect(page.locator("#health")).to_contain_text("Pending: 7 tasks")
        expect(page.get_by_label("Select dead 1")).to_be_checked()
        expect(page.get_by_label("Select new dead")).to_have_count(0)
        assert set(asked) == {f"{address}/"}


@pytest.mark.extended
@pytest.mark.parametrize(
    "closed",
    [
        RedirectResponse(f"http://{HOST}/login"),
        RedirectResponse("/login"),
        HTMLResponse("<h1>Please sign in</h1><main id=main><p id=health>Healthy</p><div id=live></div></main>"),
        HTMLResponse("sign in", 401),
        HTMLResponse("bad gateway", 502),
    ],
    ids=["other-origin", "same-origin", "page", "401", "502"],
)
def test_a_person_sees_that_another_page_answers(database: Database, browser: Browser, closed: Response) -> None:
    """Live update keeps the figures, and says that they are old. A form is not sent, and keeps what was typed."""
    insert(database, [row("a")])
    table = TaskTable(opened(database))
    with gated_console(opened(database)) as gate, tab(browser, gate.address, failures=True) as page:
        page.goto("/topic?name=orders")
        expect(page.locator("#live")).to_contain_text("Oldest task")  # as soon as it is read
        gate.closed = closed
        page.get_by_label("Reason").first.fill("why")
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("form .unsent")).to_contain_text("Nothing was sent")
        page.evaluate(ASK)
        expect(page.locator("#stale")).to_contain_text("These figures are not current")
        expect(page.locator("#health")).to_be_hidden()
        expect(page.locator("#live")).to_contain_text("Oldest task")
        page.get_by_role("searchbox").fill("a")
        page.get_by_role("button", name="Search").click()
        expect(page.locator("header .unsent")).to_be_visible()
        gate.closed = None
        page.evaluate(ASK)
        expect(page.locator("#stale")).to_be_hidden()
        expect(page.locator("#health")).to_be_visible()
        assert admin.operations.latest(table, 5) == []
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert [each.reason for each in admin.operations.latest(table, 5)] == ["why"]


async def silent(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """Answer nothing for longer than a page waits."""
    await anyio.sleep(2)


#: Lets a page wait for half a second instead of 20.
IMPATIENT = "const timeout = AbortSignal.timeout.bind(AbortSignal); AbortSignal.timeout = () => timeout(500)"


@pytest.mark.extended
def test_the_page_says_why_a_request_failed(database: Database, browser: Browser) -> None:
    """After a timeout, a refusal by a proxy, one by the console, and without a network."""
    failures: list[tuple[ASGIApp, str]] = [
        (silent, "The console did not answer."),
        (HTMLResponse("denied", 403), "Another page answered instead of the console"),
        (HTMLResponse("<h1>This needs the role viewer</h1>", 403, HEADERS), "This needs the role viewer."),
    ]
    insert(database, [row("a")])
    with gated_console(opened(database)) as gate, tab(browser, gate.address, failures=True) as page:
        page.add_init_script(IMPATIENT)
        page.goto("/topic?name=orders")
        stale = page.locator("#stale")
        for closed, sentence in failures:
            gate.closed = closed
            page.evaluate(ASK)
            expect(stale).to_contain_text(sentence)
            page.get_by_role("button", name="Pause").click()
            expect(page.locator("form .unsent")).to_contain_text(sentence)
            gate.closed = None
            page.evaluate(ASK)
            expect(stale).to_be_hidden()
        page.route("**/*", lambda route: route.abort())
        page.evaluate(ASK)
        expect(stale).to_contain_text("The console did not answer.")


@pytest.mark.extended
def test_live_update_keeps_focus_and_selection(database: Database, browser: Browser) -> None:
    """Also if a row appears before the one with the focus, and the list of problems before the selected heading."""
    insert(database, [row("scheduled", AvailableAt=FUTURE)])
    with gated_console(opened(database)) as gate, tab(browser, gate.address) as page:
        page.goto("/")
        page.get_by_role("link", name="orders", exact=True).focus()
        page.get_by_role("heading", name="Topics").evaluate("heading => getSelection().selectAllChildren(heading)")
        insert(database, [row(f"a{n}", Topic="a topic before it") for n in range(7)])
        page.evaluate(ASK)
        expect(page.get_by_role("link", name="a topic before it", exact=True)).to_be_visible()
        expect(page.get_by_role("heading", name="Problems")).to_be_visible()
        assert page.evaluate("document.activeElement.textContent") == "orders"
        assert page.evaluate("getSelection().toString()") == "Topics"


@pytest.mark.extended
def test_an_operation_that_ends_can_no_longer_be_stopped(database: Database, browser: Browser) -> None:
    table, author = TaskTable(opened(database)), admin.operations.Author("jane")
    selection = TaskSelection(state="dead", topic="orders")
    with gated_console(opened(database)) as gate, tab(browser, gate.address) as page:
        admin.execution.begin(table, "retry", selection, author, id=STOPPED, selected=0)
        page.goto(f"/operation?id={STOPPED}")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        list(admin.execution.resume(table, STOPPED))
        page.evaluate(ASK)
        expect(page.locator("#live")).to_contain_text("finished")
        expect(page.locator("main form")).to_have_count(0)
        expect(page.locator("main")).to_contain_text("This is no longer possible")


@pytest.mark.extended
@pytest.mark.parametrize("script", [True, False], ids=["script", "no-script"])
def test_forms_send_every_character(database: Database, browser: Browser, script: bool) -> None:
    """A browser would change line breaks and NUL. A program without the library can register such an ID."""
    ids = ["a\nb", "a\r\nb", "\ra", "a\x00b", "ü%0A&id=x+y", " \t"]
    insert(database, [row(id, AvailableAt=NEVER, OrderingKey="k\n1") for id in ids])
    with gated_console(opened(database)) as gate, tab(browser, gate.address, java_script_enabled=script) as page:
        page.goto("/tasks?state=dead&ordering_key=k%0A1&topic=nowhere")
        page.get_by_label("Topic").fill("orders")
        page.get_by_role("button", name="Filter").click()
        expect(page.get_by_role("checkbox")).to_have_count(len(ids))
        for checkbox in page.get_by_role("checkbox").all():
            checkbox.check()
        page.get_by_role("button", name="Retry selected").click()
        page.get_by_role("button", name="Retry 6 tasks").click()
        expect(page.get_by_role("heading", name="Operation: retry")).to_be_visible()
        eventually(lambda: all(each["AvailableAt"] != NEVER for each in rows_of(database).values()))
