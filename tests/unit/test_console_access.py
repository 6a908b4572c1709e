"""Access to the console: every route and method with every role, and requests of other sites, hosts and proxies."""

import itertools
from typing import Any
from unittest import mock

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from outbox.console import application
from outbox.console.access import HEADERS, MAX_FORM
from outbox.console.application import routes
from outbox.console.roles import EVERYTHING, VIEWERS, Role, Roles
from outbox.console.visits import Route, Visit
from outbox.errors import NotReached
from outbox.table import schema
from tests.support.console import ORIGIN, SAME, client, recording

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
#: Each role alone, and a person without any.
HELD = [frozenset[Role](), *(frozenset({role}) for role in Role)]


def only(held: frozenset[Role]) -> Roles:
    return Roles(dict.fromkeys(held, ("ann",)))


@pytest.mark.parametrize("held", HELD, ids=lambda held: "+".join(held) or "none")
def test_every_route_and_method_needs_its_role(held: frozenset[Role]) -> None:
    recorded, visits = recording(routes())
    caller, may = client(recorded, roles=only(held)), only(held).of("ann")
    for route, method in itertools.product(recorded, METHODS):
        visits.clear()
        answer = caller.request(method, route.path, headers=SAME)
        found = [each for each in recorded if each.path == route.path and each.method == method.replace("HEAD", "GET")]
        allowed = bool(found) and (found[0].role is None or found[0].role in may)
        assert bool(visits) == allowed, (method, route.path, answer.status_code)
        assert answer.status_code == (200 if allowed else 403 if found else 405), (method, route.path)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
        assert not {"set-cookie", "access-control-allow-origin"} & set(answer.headers)


def test_every_unsafe_route_has_a_role_of_its_own() -> None:
    found = routes()
    assert all(route.role not in (None, Role.VIEWER) for route in found if route.method != "GET")
    assert [route.path for route in found if route.role is None] == ["/healthz"]
    for role in (None, Role.VIEWER):
        with pytest.raises(ValueError, match="a viewer changes nothing"):
            Route("/x", lambda _visit: pytest.fail("called"), role, "POST")


CHANGE = Route("/change", lambda _visit: pytest.fail("replaced"), Role.OPERATOR, "POST")
SHOW = Route("/show", lambda _visit: pytest.fail("replaced"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Sec-Fetch-Site": ""}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"}, 403),
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "https://localhost"}, 200),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "http://localhost:81"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "//["}, 403),
        ({"Origin": ""}, 403),
        ({}, 403),
    ],
)
def test_only_a_page_of_the_console_sends_an_action(headers: dict[str, str], status: int) -> None:
    recorded, visits = recording([CHANGE])
    answer = client(recorded).post("/change", headers={"Content-Type": SAME["Content-Type"]} | headers)
    assert (answer.status_code, len(visits)) == (status, status == 200)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:9", "[::1]:8080"])
def test_the_console_answers_to_its_hosts(host: str) -> None:
    recorded, _ = recording([SHOW])
    assert client(recorded).get("/show", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil", "[::1", "", "a@localhost"]
)
def test_the_console_answers_to_no_other_host(host: str) -> None:
    recorded, visits = recording([SHOW, Route("/healthz", SHOW.handler, role=None)])
    for path in ("/show", "/healthz", "/none"):
        assert client(recorded).get(path, headers={"Host": host}).status_code == 403
    assert not visits


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
        with mock.patch.object(application, "routes", return_value=recorded), mock.patch.object(schema, "layout"):
            app = application.app(database, identify=lambda _request: "ann", roles=EVERYTHING, **flags)
        caller = TestClient(app, base_url=ORIGIN)
        caller.get("/workers")
        assert visits.pop().roles == allowed


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
    assert visit.redirect("/", name="").headers["location"] == "/outbox/?name="


def test_the_console_can_be_mounted_in_another_application() -> None:
    recorded, visits = recording([SHOW])
    mounted = Starlette(routes=[Mount("/ops", client(recorded).app)])
    answer = TestClient(mounted, base_url=ORIGIN).get("/ops/show?q=1")
    assert (answer.status_code, visits[0].path, visits[0].prefix) == (200, "/show", "/ops")
    assert TestClient(mounted, base_url=ORIGIN).get("/ops/none").status_code == 404
