"""Access to the console: every route and method with every role, and requests of other sites, hosts and proxies."""

import contextlib
import hashlib
import logging
import re
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from outbox.errors import NotReached, SettingError
from outbox.table import schema
from outbox_admin import console
from outbox_admin.console import routes
from outbox_admin.web import application
from outbox_admin.web.application import HEADERS, MAX_FORM
from outbox_admin.web.roles import EVERYTHING, VIEWERS, Role, Roles, RolesFile
from outbox_admin.web.visits import CONTENTS, FILES, Route, Visit, Work
from tests.support.console import ORIGIN, SAME, asked, client, recording

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
#: Each role alone, and a person without any.
HELD = [frozenset[Role](), *(frozenset({role}) for role in Role)]


@pytest.mark.parametrize("held", HELD, ids=lambda held: "+".join(held) or "none")
def test_every_route_and_method_needs_its_role(held: frozenset[Role]) -> None:
    recorded, visits = recording(routes())
    roles = Roles(dict.fromkeys(held, ("ann",)))
    caller, may = client(recorded, roles=roles), roles.of("ann")
    methods = {route: (route.method, *(METHODS if not held else ())) for route in recorded}
    for route, method in ((route, method) for route, tried in methods.items() for method in tried):
        visits.clear()
        answer = caller.request(method, route.path, headers=SAME)
        found = [each for each in recorded if each.path == route.path and each.method == method.replace("HEAD", "GET")]
        allowed = bool(found) and found[0].role in may
        assert bool(visits) == allowed, (method, route.path, answer.status_code)
        assert answer.status_code == (200 if allowed else 403 if found else 405), (method, route.path)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
        assert not {"set-cookie", "access-control-allow-origin"} & set(answer.headers)


def test_every_unsafe_route_has_a_role_of_its_own() -> None:
    found = routes()
    assert all(route.role is not Role.VIEWER for route in found if route.method != "GET")
    with pytest.raises(ValueError, match="a viewer changes nothing"):
        Route("/x", lambda _visit: pytest.fail("called"), Role.VIEWER, "POST")


CHANGE = Route("/change", lambda _visit: pytest.fail("replaced"), Role.OPERATOR, "POST")
STYLE = FILES["console.css"]
SHOW = Route("/show", lambda _visit: pytest.fail("replaced"))


def test_only_a_page_of_the_console_sends_an_action() -> None:
    recorded, visits = recording([CHANGE])
    caller = client(recorded)
    for headers, status in (
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"}, 403),
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "//["}, 403),
        ({}, 403),
    ):
        visits.clear()
        answer = caller.post("/change", headers={"Content-Type": SAME["Content-Type"]} | headers)
        assert (answer.status_code, len(visits)) == (status, status == 200), headers


def test_a_page_of_another_site_can_only_lead_to_a_page() -> None:
    """An image, a script, a frame or a page that is loaded in advance would run the queries of a page unseen."""
    recorded, visits = recording([SHOW])
    caller = client(recorded)
    for status, *given in (
        (200, "same-origin", "cors", "empty"),
        (200, "none", "navigate", "document"),
        (200, "cross-site", "navigate", "document"),
        (403, "cross-site", "no-cors", "image"),
        (403, "cross-site", "cors", "empty"),
        (403, "cross-site", "navigate", "iframe"),
        (403, "cross-site", "navigate", "document", "prefetch;prerender"),
        (403, "cross-site"),
        (403, "", "navigate", "iframe"),
    ):
        names = ("Sec-Fetch-Site", "Sec-Fetch-Mode", "Sec-Fetch-Dest", "Sec-Purpose")
        for method in ("GET", "HEAD"):
            visits.clear()
            answer = caller.request(method, "/show", headers=dict(zip(names, given, strict=False)))
            assert (answer.status_code, len(visits)) == (status, status == 200), given
            assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"


OURS = ("localhost", "LOCALHOST:8080", "127.0.0.1:9", "[::1]:8080", "[0:0:0:0:0:0:0:1]")
FOREIGN = ("evil.example", "localhost.evil.example", "127.0.0.1.evil", "[::1", "", "a@localhost")


@pytest.mark.parametrize(("host", "status"), [*((host, 200) for host in OURS), *((host, 403) for host in FOREIGN)])
def test_the_console_answers_to_its_hosts_only(host: str, status: int) -> None:
    recorded, visits = recording([SHOW])
    for path in ("/show", STYLE):
        assert client(recorded).get(path, headers={"Host": host}).status_code == status
    assert len(visits) == (status == 200)
    # The health check of a balancer sends the address of the pod.
    assert client(recorded, prefix="/outbox").get("/outbox/healthz", headers={"Host": host}).text == "ok\n"


def test_actions_and_data_need_their_flags_whatever_the_roles_file_says() -> None:
    everyone = Roles({Role.DESTROYER: ("ann",), Role.DATA: ("bob",)})
    assert everyone.of("ann") == {Role.DESTROYER, Role.OPERATOR, Role.VIEWER}
    assert everyone.of("bob") == {Role.DATA, Role.VIEWER}
    assert everyone.of("eve") == set()
    recorded, visits = recording(routes())
    database = mock.Mock()
    for flags, allowed in (
        ({}, {Role.VIEWER}),
        ({"show_data": True}, {Role.VIEWER, Role.DATA}),
        ({"allow_actions": True}, {Role.VIEWER, Role.OPERATOR, Role.DESTROYER}),
    ):
        with mock.patch.object(console, "routes", return_value=recorded), mock.patch.object(schema, "layout"):
            app = console.app(database, identify=lambda _request: "ann", roles=EVERYTHING, **flags)
        caller = TestClient(app, base_url=ORIGIN)
        caller.get("/workers")
        assert visits.pop().roles == allowed


def test_a_changed_roles_file_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "roles.json"
    file.write_text('{"operator": ["ann"]}', encoding="utf-8")
    roles = RolesFile(file.read_text)
    assert Role.OPERATOR in roles.of("ann")
    for text in ("{", '{"owner": []}'):
        file.write_text(text, encoding="utf-8")
        assert all(Role.OPERATOR in roles.of("ann") for _ in range(2))
    assert caplog.text.count("the last ones stay valid") == 2
    file.write_text('{"viewer": ["ann"]}', encoding="utf-8")
    assert roles.of("ann") == {Role.VIEWER}
    file.unlink()
    assert roles.of("ann") == roles.of("ann") == {Role.VIEWER}
    assert caplog.text.count("the last ones stay valid") == 3  # once for each fault, not for each request
    with pytest.raises(FileNotFoundError):
        RolesFile(file.read_text)


def test_files_are_kept_by_browsers_and_a_new_content_has_a_new_path() -> None:
    """Each is whole, with and without compression."""
    caller = client([SHOW])
    answer = caller.get(STYLE)
    assert "immutable" in answer.headers["cache-control"]
    assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS | {"Cache-Control": mock.ANY}
    assert hashlib.sha256(answer.content).hexdigest().startswith(STYLE.split("/")[2])
    assert caller.get("/static/console.css").status_code == 404
    for encoding in ("gzip", "identity", "gzip", "identity"):
        answer = caller.get(STYLE, headers={"Accept-Encoding": encoding})
        assert answer.content == CONTENTS[STYLE]
        assert answer.headers.get("content-encoding", "identity") == encoding


def test_a_refusal_says_which_flag_or_role_is_missing() -> None:
    recorded, _ = recording([CHANGE])
    closed = client(recorded, allowed=frozenset({Role.VIEWER}))
    assert "without --allow-actions" in closed.post("/change", headers=SAME).text
    viewer = client(recorded, roles=VIEWERS)
    assert "Ask for ann to be added to the role operator" in viewer.post("/change", headers=SAME).text


@pytest.mark.parametrize(("error", "status"), [(KeyError("secret"), 500), (NotReached("away"), 503)])
def test_an_identity_that_cannot_be_found_out_opens_nothing(error: Exception, status: int) -> None:
    recorded, visits = recording([SHOW])
    answer = client(recorded, identify=mock.Mock(side_effect=error)).get("/show")
    assert (answer.status_code, visits, "secret" in answer.text) == (status, [], False)
    assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS


@pytest.mark.parametrize("nobody", ["", None])
def test_a_person_without_a_name_is_not_everyone(nobody: Any) -> None:
    """The role of `*` is for everyone with an identity. An application may return nothing for a visitor."""
    recorded, visits = recording([SHOW, CHANGE])
    caller = client(recorded, identify=lambda _request: nobody)
    assert [caller.get("/show").status_code, caller.post("/change", headers=SAME).status_code] == [403, 403]
    assert not visits


def test_only_small_urlencoded_forms_are_read() -> None:
    recorded, visits = recording([CHANGE])
    caller = client(recorded)
    assert caller.post("/change", headers=SAME | {"Content-Type": "text/plain"}, content="a=1").status_code == 415
    assert caller.post("/change", headers=SAME, content="a=" + "x" * MAX_FORM).status_code == 413
    assert not visits
    assert caller.post("/change?name=%2F..", headers=SAME, content=b"id=1&id=2&bad=\xff%ff").status_code == 200
    [visit] = visits
    assert visit.form.getlist("id") == ["1", "2"]
    assert (visit.query["name"], visit.person) == ("/..", "ann")


def test_a_prefix_is_part_of_each_address() -> None:
    recorded, visits = recording([SHOW])
    caller = client(recorded, prefix="/outbox")
    # Some proxies remove the prefix.
    assert [caller.get(path).status_code for path in ("/outbox/show", "/show", "/outboxshow")] == [200, 200, 404]
    visit: Visit = visits[0]
    assert visit.link("/task", id="a/b", topic=None) == "/outbox/task?id=a%2Fb"
    assert visit.link("/topic", name="\ud800") == "/outbox/topic?name=%3F"  # any text of a row
    assert visit.redirect("/", name="").headers["location"] == "/outbox/?name="


def test_the_console_can_be_mounted_in_another_application() -> None:
    recorded, visits = recording([SHOW])
    mounted = Starlette(routes=[Mount("/ops", client(recorded).app)])
    answer = TestClient(mounted, base_url=ORIGIN).get("/ops/show?q=1")
    assert (answer.status_code, visits[0].path, visits[0].prefix) == (200, "/show", "/ops")
    assert TestClient(mounted, base_url=ORIGIN).get("/ops/none").status_code == 404
    with pytest.raises(WebSocketDisconnect), TestClient(mounted, base_url=ORIGIN).websocket_connect("/ops/"):
        pytest.fail("opened")


def test_the_function_refuses_what_the_command_refuses() -> None:
    for name, value in (
        ("path_prefix", "/outbox/"),
        ("path_prefix", "outbox"),
        ("allowed_hosts", "a b"),
        ("allowed_hosts", "https://outbox.example.com"),
        ("allowed_hosts", ""),
        ("production", "shop prod"),
        ("docs_url", "javascript:alert(1)"),
        ("docs_url", "https://example.com/docs/"),
    ):
        given = {name: value.splitlines() if name == "allowed_hosts" else value}
        sentence = re.escape(f"{name}: {value!r} is not allowed")
        with pytest.raises(SettingError, match=sentence), mock.patch.object(schema, "layout"):
            console.app(mock.Mock(), **given)


@pytest.mark.parametrize(("prefix", "page"), [("/tasks", "/tasks"), ("/topic/ask", "/topic/ask"), ("/top", "")])
def test_a_prefix_is_not_the_path_of_a_page(prefix: str, page: str) -> None:
    """A proxy may remove the prefix, so /tasks would be both the overview and the page of tasks."""
    refused = pytest.raises(
        SettingError, match=f"the path prefix {prefix} is also the beginning of a page's path, {page}"
    )
    with mock.patch.object(schema, "layout"), refused if page else contextlib.nullcontext():
        console.app(mock.Mock(), path_prefix=prefix)


@pytest.mark.parametrize("hosts", ["Outbox.example.com:443, [::0:1]", ["OUTBOX.example.com", "::1"]])
def test_the_notation_of_a_host_does_not_matter(hosts: Any) -> None:
    with mock.patch.object(schema, "layout"):
        assert console.app(mock.Mock(), allowed_hosts=hosts).allowed_hosts == ("outbox.example.com", "::1")


SINGLE, ALL = "id=a&selected=1", "state=dead"
#: What a person does in an incident, and what reads many rows, each with the kind of its place.
WORKS: dict[tuple[str, str, str], Work] = {
    ("GET", "/", ""): Work.LIGHT,
    ("GET", "/topic", "name=a"): Work.LIGHT,
    ("GET", "/task", "id=a"): Work.LIGHT,
    **{("POST", f"/topic/{name}", "name=a"): Work.URGENT for name in ("pause", "resume", "probe", "unset")},
    **{("POST", f"/operation/{name}", "id=a"): Work.URGENT for name in ("stop", "continue-retry", "continue-purge")},
    **{(method, "/tasks/retry", SINGLE): Work.URGENT for method in ("GET", "POST")},
    **{(method, "/tasks/cancel", ALL): Work.SCAN for method in ("GET", "POST")},
    **{(method, "/topic/controls", "name=a&unset=rate"): Work.URGENT for method in ("GET", "POST")},
    ("GET", "/tasks", ALL): Work.SCAN,
    ("GET", "/search", "q=a"): Work.SCAN,
}


def test_slow_pages_delay_nothing_urgent_and_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and previews have all of their places. A page without one says so, and no browser loads it by itself."""
    monkeypatch.setattr(application, "WAIT_SECONDS", 0.05)
    may_end, most = threading.Event(), application.PLACES[Work.SCAN]

    def slow(_visit: Visit) -> Response:
        return PlainTextResponse(str(may_end.wait(60)))

    app = client([Route("/slow", slow), *recording(routes())[0]]).app

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            answers: list[tuple[int, dict[str, str], str]] = []
            all_wait = anyio.Event()

            async def ask(path: str) -> None:
                answers.append(await asked(app, path))
                if len(answers) == 45 - most:
                    all_wait.set()

            for _ in range(45):
                tasks.start_soon(ask, "/slow")
            await all_wait.wait()
            found = {(status, headers["retry-after"], headers.get("refresh")) for status, headers, _ in answers}
            assert found == {(503, str(application.RETRY_SECONDS), None)}
            assert all("The console is busy: 8 requests" in body for _, _, body in answers)
            assert (await asked(app, "/healthz"))[2] == "ok\n"
            assert (await asked(app, STYLE))[0] == 200
            for (method, path, query), work in WORKS.items():
                sent = [{"type": "http.request", "body": b""}] if method == "POST" else []
                status, _, _ = await asked(app, path, *sent, query=query)
                assert status == (503 if work is Work.SCAN else 200), (method, path, query)
            may_end.set()
        assert {status for status, _, _ in answers[-most:]} == {200}
        assert (await asked(app, "/slow"))[0] == 200

    anyio.run(scenario)


def test_a_client_that_leaves_while_it_sends_a_form_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    recorded, visits = recording([CHANGE])
    part = {"type": "http.request", "body": b"reason=", "more_body": True}
    with caplog.at_level(logging.INFO, "outbox"):
        answer = anyio.run(asked, client(recorded).app, "/change", part, {"type": "http.disconnect"})
    assert (answer[0], visits) == (0, [])
    assert [(each.levelname, each.exc_info) for each in caplog.records] == [("INFO", None)]


def test_views_and_refusals_leave_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Who, what and from where. A tab that reads its page again adds nothing, and each form adds a line."""
    recorded, _ = recording([SHOW, CHANGE])
    ann = client(recorded, roles=VIEWERS)
    bob = client(recorded, identify=lambda _request: "bob")
    with caplog.at_level(logging.INFO, "outbox"):
        for _ in range(3):
            ann.get("/show?id=a%0Ab", headers={"X-Forwarded-For": "192.0.2.7"})
        ann.get("/none")
        ann.post("/change", headers=SAME)
        for _ in range(2):
            bob.post("/change", headers=SAME)
        client(recorded, identify=lambda _request: "").get("/show", headers={"Host": "evil.example"})
    assert [each.getMessage() for each in caplog.records] == [
        "ann: GET /show?id=a%0Ab from testclient, X-Forwarded-For 192.0.2.7",
        "refused a person without identity: GET /none from testclient: There is no such page",
        "refused ann: POST /change from testclient: This needs the role operator",
        "bob: POST /change from testclient",
        "bob: POST /change from testclient",
        "refused a person without identity: GET /show from testclient: The console does not answer to this host name",
    ]
