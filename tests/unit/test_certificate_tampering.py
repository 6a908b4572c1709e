"""Each change of certificates, keys, chain, windows, inputs and proofs is refused with one sentence that names it."""

import base64
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outbox.base.times import shown
from outbox_pipeline import cli
from outbox_pipeline.jobs.certificate import document, keys, merkle
from outbox_pipeline.jobs.certificate.commands import _check_archive
from outbox_pipeline.jobs.certificate.evidence import Evidence
from tests.support.certificates import Place, data, new_key, payload

FIRST = datetime(2026, 11, 20, tzinfo=UTC)
DAY = timedelta(days=1)
COUNTS = dict.fromkeys(("registered", *document.OUTCOMES, "republished"), 0) | {"registered": 4, "delivered": 4}


def write(place: Place, name: str, content: dict[str, Any], files: dict[str, str], key: str = "key") -> Path:
    signer = keys.file_signer(str(place.path(f"{key}.pem")))
    file = place.path(name)
    file.write_text(document.signed(document.payload(content, files), signer))
    return file


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def files_of(place: Place, day: datetime) -> dict[str, str]:
    """Write the archive and the received files of a day, and return their digests by name."""
    folder = place.path("archive") / f"window={day:%Y%m%dT%H%M%SZ}_{day + DAY:%Y%m%dT%H%M%SZ}"
    run = folder / "run=0/SentDate=x/TopicFolder=orders"
    run.mkdir(parents=True)
    at = pa.array([day + timedelta(hours=1)] * 4, pa.timestamp("us", tz="UTC"))
    rows = {
        "Id": [f"{day:%d}-{n}" for n in range(4)],
        "CreatedAt": at,
        "SentAt": at,
        "Data": [data(b"paid", a="b")] * 4,
    }
    pq.write_table(pa.table(rows), run / "part-0.parquet")
    log = place.path("archive/_delta_log")
    log.mkdir(exist_ok=True)
    (log / f"{day:%d}.json").write_text(json.dumps({"since": shown(day), "data": f"{folder.name}/run=0"}))
    received = place.path("received") / f"{day:%d}"
    received.mkdir(parents=True)
    (received / "1.jsonl").write_text(f'{{"message_id": "{day}"}}\n')
    archived = [run / "part-0.parquet", log / f"{day:%d}.json"]
    inputs = [(document.ARCHIVE, place.path("archive"), each) for each in archived]
    inputs.append((document.RECEIVED, received, received / "1.jsonl"))
    return {f"{kind}{each.relative_to(base)}": digest(each) for kind, base, each in inputs}


def content_of(place: Place, day: datetime, files: dict[str, str], previous: str | None) -> dict[str, Any]:
    """Return the content of a certificate, whose tree is that of the files."""
    content: dict[str, Any] = {
        "database": "projects/p/instances/i/databases/shop",
        "window": {"since": shown(day), "until": shown(day + DAY)},
        "previous": previous,
        "audit": {"grace_seconds": 600.0},
        "tasks": merkle.Tree().summary(),
        "counts": {**COUNTS, "unknown": 0, "foreign": 0},
        "topics": {"orders": COUNTS},
        "not_delivered": [],
    }
    tree = merkle.Tree()
    certificate = document.read(document.payload(content, files), "")
    for task in Evidence(str(place.path("archive"))).tasks(certificate):
        tree.add(*task)
    return content | {"tasks": tree.summary()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Certificates of three days, with everything that they name."""
    place, previous = Place(tmp_path_factory.mktemp("evidence")), None
    for name in ("key", "other"):
        new_key(place.folder, name)
    for day in (FIRST, FIRST + DAY, FIRST + 2 * DAY):
        files = files_of(place, day)
        file = write(place, f"certificate-{day:%d}.json", content_of(place, day, files, previous), files)
        previous = hashlib.sha256(document.payload_of(file.read_bytes(), "")).hexdigest()
    prove = ["--certificate", f"{place.path('certificate-21.json')}", "--public-key", f"{place.path('key.pub')}"]
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("outbox_pipeline.jobs.certificate.commands.say", lines.append)
        assert cli.main(["certificate", "prove", "21-2", *prove, "--archive", str(place.path("archive"))]) == 0
    place.path("proof.json").write_text("".join(lines))
    return place


@pytest.fixture
def place(original: Place, tmp_path: Path) -> Place:
    return original.copy(tmp_path)


def verify(place: Place, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    proof = ["--proof", str(place.path("proof.json"))]
    code = cli.main(place.verify(*place.inputs(), *proof))
    return code, capsys.readouterr().err


def test_unchanged_evidence_is_verified(place: Place, capsys: pytest.CaptureFixture[str]):
    assert verify(place, capsys) == (0, "")


# Changes. Each gets the folder, in which the certificate of the 21st is the middle one.
Change = Callable[[Place], object]


def middle(place: Place) -> Path:
    return place.path("certificate-21.json")


def envelope(**changed: Any) -> Change:
    def change(place: Place) -> None:
        outer = json.loads(middle(place).read_text()) | changed
        middle(place).write_text(
            "{" + ",\n ".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in outer.items()) + "}\n"
        )

    return change


def signature(name: str, value: str) -> Change:
    def change(place: Place) -> None:
        [one] = json.loads(middle(place).read_text())["signatures"]
        envelope(signatures=[one | {name: value}])(place)

    return change


def altered(place: Place, **changed: Any) -> bytes:
    statement = payload(middle(place))
    statement["predicate"] |= changed
    return json.dumps(statement).encode()


def signed_again(key: str = "key", name: str = "certificate-21.json", **changed: Any) -> Change:
    """Sign another content, as the holder of a key can."""

    def change(place: Place) -> None:
        statement = payload(middle(place))
        files = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        write(place, name, statement["predicate"] | changed, files, key)

    return change


def signed_bytes(make: Callable[[Place], bytes]) -> Change:
    def change(place: Place) -> None:
        middle(place).write_text(document.signed(make(place), keys.file_signer(str(place.path("key.pem")))))

    return change


def other_type(place: Place) -> bytes:
    return document.rfc8785.dumps(payload(middle(place)) | {"predicateType": "https://slsa.dev/provenance/v1"})


def spaced(place: Place) -> bytes:
    return json.dumps(payload(middle(place))).encode()


def files(pattern: str, edit: Callable[[Path], object]) -> Change:
    return lambda place: edit(min(place.folder.glob(pattern)))


def flipped(file: Path) -> None:
    found = bytearray(file.read_bytes())
    found[len(found) // 2] ^= 1
    file.write_bytes(found)


def proof(**changed: Any) -> Change:
    def change(place: Place) -> None:
        file = place.path("proof.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return change


def forged(place: Place) -> None:
    """Sign with another key, and name ours."""
    [one] = json.loads(middle(place).read_text())["signatures"]
    signed_again("other")(place)
    signature("keyid", one["keyid"])(place)


def other_public_key(place: Place) -> None:
    shutil.copy(place.path("other.pub"), place.path("key.pub"))


WINDOW, COMMIT = "archive/window=20261121T*", "archive/_delta_log/21.json"
WRONG = COUNTS | {"delivered": 3}
LATER = {"since": shown(FIRST + DAY), "until": shown(FIRST + 3 * DAY)}
CHANGES: dict[str, tuple[Change, str]] = {
    # certificates
    "a count is changed": (
        lambda place: envelope(payload=base64.b64encode(altered(place, counts=WRONG)).decode())(place),
        r"21\.json: the signature does not match the content",
    ),
    "the summary is changed": (envelope(summary="COMPLETE: 5 tasks delivered"), "such as the summary"),
    "the signature is changed": (signature("sig", "AAAA"), "the signature does not match the content"),
    "the name of the key is changed": (signature("keyid", "0000"), "names the key 0000, but the public keys given are"),
    "the type is changed": (envelope(payloadType="text/plain"), "has the payload type 'text/plain'"),
    "a field is added": (envelope(note="checked"), "other bytes were changed"),
    "a signature is added": (envelope(signatures=[{}, {}]), "is not a certificate: ValueError"),
    "the end is missing": (lambda place: middle(place).write_text(middle(place).read_text()[:-9]), "is not a certif"),
    "the file is empty": (lambda place: middle(place).write_text(""), "is not a certificate"),
    # keys
    "it is signed again with another key": (signed_again("other"), "names the key"),
    "it is signed with another key that claims to be ours": (forged, "the signature does not match the content"),
    "the public key is replaced": (other_public_key, r"20\.json names the key"),
    "the public key is damaged": (files("key.pub", lambda file: file.write_text("")), "is not a public key"),
    # what only the holder of the key can do
    "outcomes do not add up": (signed_again(topics={"orders": WRONG}), "the outcomes of orders do not add up to 4"),
    "topics do not add up": (signed_again(topics={}), "the count registered of the topics does not add up to 4"),
    "the form is not canonical": (signed_bytes(spaced), "is not in the form of RFC 8785"),
    "it is of another type": (signed_bytes(other_type), "is no certificate of version 1"),
    "the list has other tasks": (
        signed_again(tasks=merkle.Tree().summary(), name="certificate-22.json", window=LATER),
        r"an overlap between .*-21\.json, .* and .*-22\.json",
    ),
    # chain and windows
    "a certificate is removed": (files("certificate-21.json", Path.unlink), r"a gap between .*-20\.json, .*-22\.json"),
    "a certificate is repeated": (
        lambda place: shutil.copy(middle(place), place.path("certificate-99.json")), "are the same certificate"
    ),
    "a certificate is issued again": (signed_again(audit={}), r"22\.json follows .*, but .*21\.json is"),
    "a certificate forgets the one before": (signed_again(previous=None), r"21\.json follows the certificate None"),
    "a certificate is of another database": (signed_again(database="projects/p"), "is of projects/p, but"),
    "a window is longer": (signed_again(window=LATER), "an overlap between"),
    "a window is moved": (
        signed_again(window={**LATER, "since": shown(FIRST + DAY + DAY / 24)}), r"a gap between .*-20\.json"
    ),
    "a window is of no time": (signed_again(window={"since": "noon", "until": ""}), "has no valid content"),
    # inputs
    "an archived file is changed": (files(f"{WINDOW}/**/*.parquet", flipped), r"part-0\.parquet was changed since"),
    "an archived file is removed": (files(f"{WINDOW}/**/*.parquet", Path.unlink), r"lacks window=.*part-0\.parquet"),
    "an archived file is added": (
        files(f"{WINDOW}/**/*.parquet", lambda file: shutil.copy(file, file.with_name("part-1.parquet"))),
        r"part-1\.parquet was added since",
    ),
    "a commit is changed": (files(COMMIT, flipped), r"21\.json was changed since"),
    "a commit is removed": (files(COMMIT, Path.unlink), r"lacks _delta_log/21\.json"),
    "a window is removed": (files(WINDOW, shutil.rmtree), "lacks window=20261121T"),
    "a received file is changed": (files("received/21/*", flipped), r"lacks the file 1\.jsonl of .*or it was changed"),
    "a received file is removed": (files("received/21/*", Path.unlink), r"lacks the file 1\.jsonl of .*21\.json"),
    "a received file is added": (
        lambda place: place.path("received/21/2.jsonl").write_text("{}\n"), r"21/2\.jsonl is in no certificate"
    ),
    # proofs
    "a proof is of another task": (proof(task_id="21-1"), "does not prove that .* contains task '21-1'"),
    "a proof is of another message": (proof(digest="0" * 64), "does not prove that"),
    "a proof has another place": (proof(place=1), "does not prove that"),
    "a proof has another path": (proof(path=["00" * 32] * 2), "does not prove that"),
    "a proof has a shorter path": (proof(path=[]), "does not prove that"),
    "a proof has no path": (proof(path=5), "is not a proof"),
    "a proof is for another certificate": (proof(certificate="0" * 64), "which was not given"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str, place: Place, capsys: pytest.CaptureFixture[str]):
    change, sentence = CHANGES[name]
    change(place)
    code, error = verify(place, capsys)
    assert code in {1, 2}
    assert error.count("\n") == 1, error
    assert re.search(sentence, error), error


def test_a_list_with_other_tasks_is_refused(place: Place):
    """Even if the holder of the key signs it, because the list is computed from the files."""
    signed_again(tasks=merkle.Tree().summary())(place)
    certificate = document.read(document.payload_of(middle(place).read_bytes(), "one"), "one")
    with pytest.raises(document.OutboxError, match="are not those of one"):
        _check_archive(certificate, Evidence(str(place.path("archive"))))


def test_random_changes_are_refused(original: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], long: bool):
    """Of any byte of any file: it is replaced, removed or repeated, or the rest of the file is."""
    targets = sorted(
        each.relative_to(original.folder)
        for pattern in ("certificate-*.json", "archive/**/*.*", "received/**/*.*")
        for each in original.folder.glob(pattern)
        if each.is_file()
    )
    place = original.copy(tmp_path)
    for seed in range(2_000 if long else 100):
        chance = random.Random(seed)
        file = place.path(str(chance.choice(targets)))
        before = file.read_bytes()
        at = chance.randrange(len(before))
        replaced = bytes([before[at] ^ chance.randrange(1, 256)])
        middle_part = chance.choice([replaced, b"", before[at : at + 1] * 2, chance.randbytes(3)])
        after = before[:at] + chance.choice([middle_part + before[at + 1 :], middle_part])
        if after == before:
            continue
        file.write_bytes(after)
        code, error = verify(place, capsys)
        file.write_bytes(before)
        assert (code, error.count("\n")) in {(1, 1), (2, 1)}, (seed, file, error)
    assert verify(place, capsys) == (0, "")


@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 8, 13])
def test_each_path_leads_to_the_root(tasks: int):
    tree, lines = merkle.Tree(), [merkle.line(str(n), "d") for n in range(tasks)]
    for n in range(tasks):
        tree.add(str(n), "d")
    root, leaves = tree.summary()["root"], list(map(merkle.leaf, lines))
    for place, line in enumerate(lines):
        path = merkle.path(leaves, place)
        assert merkle.root_from(line, place, tasks, path) == root
        assert merkle.root_from(line, place + 1, tasks, path) != root
        assert merkle.root_from(line, place, tasks, [*path, "00" * 32]) is None


def test_the_tree_is_that_of_rfc_6962():
    """The tree of seven leaves in section 2.1.3, whose node k combines i and j."""
    a, b, c, d, e, f, j = (merkle.leaf(merkle.line(str(n), "d")) for n in range(7))
    g, h, i = merkle.node(a, b), merkle.node(c, d), merkle.node(e, f)
    k, l_ = merkle.node(g, h), merkle.node(i, j)
    tree = merkle.Tree()
    for n in range(7):
        tree.add(str(n), "d")
    assert tree.summary()["root"] == merkle.node(k, l_).hex()
