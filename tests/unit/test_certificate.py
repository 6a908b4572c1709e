"""Changed evidence is refused with one sentence that names the change; and keys, in files and in Cloud KMS."""

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa, utils
from google.cloud import kms
from google.cloud.kms_v1.services.key_management_service.transports import KeyManagementServiceGrpcTransport

from outbox.base.values import shown
from outbox.errors import NotReached, SettingError
from outbox_admin.operations import Operation
from outbox_pipeline import cli
from outbox_pipeline.certificate import document
from outbox_pipeline.certificate.uncertainties import Read, uncertainties
from tests.support.certificates import Place, new_key, payload
from tests.support.rpc import Served

FIRST = datetime(2026, 11, 20, tzinfo=UTC)
DAY = timedelta(days=1)
COUNTS = dict.fromkeys((*document.OUTCOMES, "republished"), 0) | {"delivered": 4}


def write(place: Place, name: str, content: dict[str, Any], files: dict[str, str], key: str = "key") -> Path:
    signer = document.file_signer(str(place.path(f"{key}.pem")))
    file = place.path(name)
    file.write_text(document.signed(document.payload(content, files), signer))
    return file


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def files_of(place: Place, day: datetime) -> dict[str, str]:
    """Write the archive and the received files of a day, and return their digests by name."""
    folder = f"window={day:%Y%m%dT%H%M%SZ}_{day + DAY:%Y%m%dT%H%M%SZ}/run=0"
    run = place.path(f"archive/{folder}/SentDate=x")
    run.mkdir(parents=True)
    (run / "part-0.parquet").write_text(f"tasks of {day}")
    log = place.path(f"archive/_delta_log/{day:%d}.json")
    log.parent.mkdir(exist_ok=True)
    log.write_text(json.dumps({"since": shown(day), "data": folder}))
    received = place.path(f"received/{day:%d}")
    received.mkdir(parents=True)
    for name in ("1", "2"):
        (received / f"{name}.jsonl").write_text(f'{{"message_id": "{day} {name}"}}\n' * 2)
    files = [run / "part-0.parquet", log, *received.iterdir()]
    return {str(each.relative_to(place.folder)): digest(each) for each in files}


def content_of(day: datetime, previous: str | None) -> dict[str, Any]:
    return {
        "database": "projects/p/instances/i/databases/shop",
        "window": {"since": shown(day), "until": shown(day + DAY)},
        "previous": previous,
        "audit": {"grace_seconds": 600.0},
        "uncertainties": [],
        "counts": {"unknown": 0, "foreign": 0},
        "topics": {"orders": COUNTS},
        "not_delivered": [],
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Certificates of three days, with everything that they name."""
    place, previous = Place(tmp_path_factory.mktemp("evidence")), None
    for name in ("key", "other"):
        new_key(place.folder, name)
    for day in (FIRST, FIRST + DAY, FIRST + 2 * DAY):
        files = files_of(place, day)
        file = write(place, f"certificate-{day:%d}.json", content_of(day, previous), files)
        previous = hashlib.sha256(document.envelope(file.read_bytes(), "")[0]).hexdigest()
    return place


@pytest.fixture
def place(original: Place, tmp_path: Path) -> Place:
    return original.copy(tmp_path)


def verify(place: Place, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(place.verify(*place.inputs()))
    return code, capsys.readouterr().err


# Changes. Each gets the folder, in which the certificate of the 21st is the middle one.
Change = Callable[[Place], object]


def files(pattern: str, edit: Callable[[Path], object]) -> Change:
    return lambda place: edit(min(place.folder.glob(pattern)))


def text(edit: Callable[[bytes], bytes], name: str = "certificate-21.json") -> Change:
    return files(name, lambda file: file.write_bytes(edit(file.read_bytes())))


def written(outer: dict[str, Any]) -> bytes:
    lines = ",\n ".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in outer.items())
    return f"{{{lines}}}\n".encode()


def envelope(**changed: Any) -> Change:
    return text(lambda found: written(json.loads(found) | changed))


def signature(**changed: Any) -> Change:
    def change(found: bytes) -> bytes:
        outer = json.loads(found)
        return written({**outer, "signatures": [outer["signatures"][0] | changed]})

    return text(change)


def signed_again(key: str = "key", **changed: Any) -> Change:
    """Sign another content, as the holder of a key can."""

    def change(place: Place) -> None:
        statement = payload(place.path("certificate-21.json"))
        inputs = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        write(place, "certificate-21.json", statement["predicate"] | changed, inputs, key)

    return change


def signed_bytes(edit: Callable[[bytes], bytes], name: str = "certificate-21.json") -> Change:
    """Sign any bytes, as the holder of the key can with another program."""

    def change(place: Place) -> None:
        found = base64.b64decode(json.loads(place.path(name).read_text())["payload"])
        place.path(name).write_text(document.signed(edit(found), document.file_signer(str(place.path("key.pem")))))

    return change


def replaced(old: str, new: str, name: str = "certificate-21.json") -> Change:
    return signed_bytes(lambda found: found.replace(old.encode(), new.encode(), 1), name)


def with_predicate(**changed: Any) -> Change:
    def edit(found: bytes) -> bytes:
        statement = json.loads(found)
        return document.rfc8785.dumps(statement | {"predicate": statement["predicate"] | changed})

    return signed_bytes(edit)


def other_count(found: bytes) -> bytes:
    outer = json.loads(found)
    content = base64.b64decode(outer["payload"]).replace(b'"delivered":4', b'"delivered":5')
    return written(outer | {"payload": base64.b64encode(content).decode()})


def flipped(file: Path) -> None:
    found = bytearray(file.read_bytes())
    found[len(found) // 2] ^= 1
    file.write_bytes(found)


def by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def copied(name: str) -> Callable[[Path], object]:
    return lambda file: shutil.copy(file, file.with_name(name))


def times(since: timedelta = timedelta(), until: timedelta = timedelta()) -> dict[str, str]:
    return {"since": shown(FIRST + DAY + since), "until": shown(FIRST + 2 * DAY + until)}


WINDOW, COMMIT, RECEIVED = "archive/window=20261121T*", "archive/_delta_log/21.json", "received/21/1.jsonl"
PARQUET, MICRO, DEEP = f"{WINDOW}/**/*.parquet", timedelta(microseconds=1), b"[" * 100_000
SUMS = {**COUNTS, "registered": 4, "unknown": 0, "foreign": 0}
SECOND_LOST = {**COUNTS, "delivered": 3, "lost": 1}
CHANGES: dict[str, tuple[Change, str]] = {
    # the envelope
    "a count is changed": (text(other_count), r"21\.json: the signature does not match the content"),
    "the summary is changed": (envelope(summary="COMPLETE: 5 tasks delivered"), "such as the summary"),
    "the signature is in other base64": (
        text(lambda found: found.replace(b'=="}', b'="}')), "is not a certificate: Error: Incorrect padding"
    ),
    "the type is changed": (envelope(payloadType="text/plain"), "has the payload type 'text/plain'"),
    "the algorithm is none": (signature(alg="none"), "other bytes were changed"),
    "it is a token without a signature": (text(lambda _: b"eyJhbGciOiJub25lIn0.e30."), "is not a certificate"),
    "a signature is added": (envelope(signatures=[{}, {}]), "is not a certificate: ValueError"),
    "it is nested too deep": (text(lambda _: DEEP), "is not a certificate: RecursionError"),
    "it is a folder": (files("certificate-21.json", by_folder), "cannot be read: Is a directory"),
    # keys
    "it is signed again with another key": (signed_again("other"), "names the key"),
    "the public key is the private one": (
        lambda place: shutil.copy(place.path("key.pem"), place.path("key.pub")), "is not a public key"
    ),
    # what only the holder of the key can do
    "a topic has other tasks": (with_predicate(topics={"orders": SECOND_LOST}), "21.json: counts does not follow"),
    "a loss is negative elsewhere": (
        signed_again(topics={"a": SECOND_LOST, "b": {**COUNTS, "lost": -1}}), "lost is -1, which is no number of tasks"
    ),
    "a loss is not listed": (
        signed_again(topics={"orders": SECOND_LOST}), "not_delivered lists 0 tasks, but 1 were not delivered"
    ),
    "the content has a field": (with_predicate(note="checked"), "no valid content: ValueError: note is unknown"),
    "the content lacks a field": (replaced('"previous":null,', "", "certificate-20.json"), "KeyError: 'previous'"),
    "a number is a float": (replaced('"delivered":4', '"delivered":4.0'), "not in the form of RFC 8785"),
    "a number is huge": (replaced('"unknown":0', f'"unknown":{10**30}'), "no valid content: IntegerDomainError"),
    "it is of another type": (replaced("certificate:v1", "certificate:v2"), "or not of version 1"),
    "messages of no task are left out of the verdict": (
        with_predicate(counts={**SUMS, "unknown": 2}), "summary does not follow"
    ),
    "an uncertainty is left out of the verdict": (with_predicate(uncertainties=["a purge"]), "summary does not follow"),
    # chain and windows
    "a certificate is removed": (files("certificate-21.json", Path.unlink), r"a gap between .*-20\.json, .*-22\.json"),
    "a certificate is repeated": (files("certificate-21.json", copied("certificate-99.json")), "an overlap between"),
    "a certificate is issued again": (signed_again(audit={}), r"22\.json follows .*, but .*21\.json is"),
    "a certificate is of another database": (signed_again(database="projects/p"), "is of projects/p, but"),
    "a window is longer": (signed_again(window=times(until=MICRO)), r"an overlap between .*-21\.json, .*-22\.json"),
    "a window ends before its start": (signed_again(window=times(since=2 * DAY)), "does not end after its start"),
    "a window is of no time": (with_predicate(window={"since": "noon", "until": ""}), "has no valid content"),
    "a window has no offset": (
        with_predicate(window={each: time[:-1] for each, time in times().items()}), "window does not follow"
    ),
    # inputs
    "an archived file is changed": (files(PARQUET, flipped), r"part-0\.parquet was changed since .*21\.json"),
    "an archived file is removed": (files(PARQUET, Path.unlink), r"lacks window=20261121.*part-0\.parquet"),
    "an archived file is a folder": (files(PARQUET, by_folder), r"lacks window=20261121.*part-0\.parquet"),
    "an archived file is added": (files(PARQUET, copied("part-1.parquet")), r"part-1\.parquet was added since"),
    "a commit is changed": (files(COMMIT, flipped), r"21\.json was changed since"),
    "a received file is changed": (files(RECEIVED, flipped), r"received/21/1\.jsonl was changed since .*21\.json"),
    "a received file is removed": (files(RECEIVED, Path.unlink), r"received lacks 21/1\.jsonl, which .*21\.json"),
    "a received file is added": (files(RECEIVED, copied("3.jsonl")), r"received/21/3\.jsonl was added since"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str, place: Place, capsys: pytest.CaptureFixture[str]):
    change, sentence = CHANGES[name]
    change(place)
    code, error = verify(place, capsys)
    assert code in {1, 2}
    assert error.count("\n") == 1, error
    assert re.search(sentence, error), error


def test_a_certificate_stays_valid_when_its_form_changes():
    """The file has all fields of 2026. `jq .payload | base64 -d` shows them."""
    kept = Path(__file__).with_name("certificate-v1.json")
    assert cli.main(["certificate", "verify", str(kept), "--public-key", str(kept.with_suffix(".pub"))]) == 0


def test_random_changes_are_refused(original: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], long: bool):
    """Of any byte of any file: it is replaced, removed or repeated, or the rest is. Unchanged, it is valid."""
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


def purge(begins: timedelta, ends: timedelta | None, tasks: int | None = 3, **selection: Any) -> Operation:
    """Return the record of a purge that began and ended so long after FIRST."""
    texts = {name: shown(value) if isinstance(value, datetime) else value for name, value in selection.items()}
    finished = None if ends is None else FIRST + ends
    return Operation("4711", "purge", FIRST + begins, finished, None, json.dumps(texts), tasks, None, None, None, None)


HOUR, MINUTE = DAY / 24, timedelta(minutes=1)
#: The day was read a minute after its end.
OF_DAY = Read(FIRST, FIRST + DAY, FIRST + DAY + MINUTE)
LATE = Read(FIRST + DAY, FIRST + 2 * DAY, FIRST + 3 * DAY)
DOUBTS: dict[str, tuple[list[Read], list[Operation], timedelta | None, str | None]] = {
    "a purge": ([OF_DAY], [purge(HOUR, 2 * HOUR, state="sent")], 7 * DAY, "1 purge may have .* operation 4711 at 2026"),
    "an unfinished purge": ([OF_DAY], [purge(HOUR, None, None)], 7 * DAY, "1 purge may have"),
    "a purge of unknown tasks": ([OF_DAY], [purge(HOUR, 2 * HOUR, archive="other", until=FIRST)], None, "1 purge may"),
    "a purge of no task": ([OF_DAY], [purge(HOUR, 2 * HOUR, 0)], 7 * DAY, None),
    "a purge before": ([OF_DAY], [purge(-HOUR, timedelta())], 7 * DAY, None),
    "a purge after the read": ([OF_DAY], [purge(DAY + MINUTE, None)], 7 * DAY, None),
    "a purge of older tasks": ([OF_DAY], [purge(HOUR, None, until=FIRST)], 7 * DAY, None),
    "a purge of newer tasks": ([OF_DAY], [purge(HOUR, None, since=FIRST + DAY)], 7 * DAY, None),
    "a purge of cancelled tasks": ([OF_DAY], [purge(HOUR, None, state="cancelled")], 7 * DAY, None),
    "a late read": ([OF_DAY, LATE], [], None, "tasks sent from 2026-11-21T.* to 2026-11-22T.* late"),
    "a late purge": ([OF_DAY, LATE], [purge(2 * DAY, None)], None, "1 purge may .*|the archive read .* late"),
    "a late read after the retention": ([LATE], [], DAY, "after they were sent, but those sent from 2026-11-21T"),
    "a retention of no day": ([OF_DAY], [], 0 * DAY, "tasks are deleted 0 days after they were sent"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOUBTS)
def test_what_can_hide_a_loss_is_said(name: str):
    reads, purges, kept, sentence = DOUBTS[name]
    found = "; ".join(uncertainties(reads, purges, kept))
    assert found == "" if sentence is None else re.search(sentence, found), found


def test_a_doubt_changes_the_first_line(original: Place):
    content = content_of(FIRST, None)
    for changed, line in (
        ({}, "COMPLETE: 4 tasks delivered"),
        ({"uncertainties": ["one; two"]}, "UNCERTAIN: 4 tasks delivered. A loss may be hidden: one; two"),
        (
            {"counts": {"unknown": 2, "foreign": 1}},
            "UNCERTAIN: 4 tasks delivered. A loss may be hidden: no task has the ID of 2 received messages",
        ),
        (
            {"topics": {"orders": SECOND_LOST}, "uncertainties": ["one"]},
            "INCOMPLETE: 1 lost of 4 tasks. A loss may be hidden: one",
        ),
    ):
        file = write(original, "other.json", content | changed, {})
        assert payload(file)["predicate"]["summary"] == line


NAME = "projects/p/locations/l/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1"
PRIVATE = ec.generate_private_key(ec.SECP256R1())


def pem(key: Any) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))


class Kms(Served):
    """Answers as Cloud KMS does."""

    algorithm = "EC_SIGN_P256_SHA256"
    signs_with = PRIVATE
    #: What is lost at the end of the digest on its way, and replaced by zeros.
    damaged = 0
    status: grpc.StatusCode | None = None

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if self.status:
            context.abort(self.status, "no permission")
        if method.endswith("/GetPublicKey"):
            key = kms.PublicKey(name=NAME, pem=pem(PRIVATE).decode(), algorithm=self.algorithm)
            yield kms.PublicKey.serialize(key)
        else:
            sent = kms.AsymmetricSignRequest.deserialize(request).digest.sha256
            came = sent[: 32 - self.damaged] + bytes(self.damaged)
            signature = self.signs_with.sign(came, ec.ECDSA(utils.Prehashed(hashes.SHA256())))
            yield kms.AsymmetricSignResponse.serialize(kms.AsymmetricSignResponse(signature=signature))


@pytest.fixture
def service() -> Iterator[tuple[Kms, kms.KeyManagementServiceClient]]:
    with Kms() as server, grpc.insecure_channel(server.address) as channel:
        yield server, kms.KeyManagementServiceClient(transport=KeyManagementServiceGrpcTransport(channel=channel))


def test_cloud_kms_signs_what_openssl_verifies(service: tuple[Kms, Any], tmp_path: Path):
    _, client = service
    signer = document.kms_signer(NAME, client)
    signed = document.encoded(b"{}")
    (tmp_path / "signed").write_bytes(signed)
    (tmp_path / "signature").write_bytes(signer.sign(signed))
    (tmp_path / "key.pub").write_bytes(pem(PRIVATE))
    command = ["openssl", "dgst", "-sha256", "-verify", "key.pub", "-signature", "signature", "signed"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout == b"Verified OK\n"
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", "key.pub", "-outform", "DER"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    ).stdout
    assert signer.public.id == hashlib.sha256(der).hexdigest()


def test_a_key_of_cloud_kms_that_cannot_sign_is_refused(service: tuple[Kms, Any]):
    answers, client = service
    answers.damaged = 1  # which CRC32C would notice, too
    with pytest.raises(NotReached, match=f"returned a signature that is not of {NAME}"):
        document.kms_signer(NAME, client).sign(b"")
    answers.damaged = 0
    answers.signs_with = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(NotReached, match="returned a signature that is not of"):
        document.kms_signer(NAME, client).sign(b"")
    answers.algorithm = "EC_SIGN_P384_SHA384"
    with pytest.raises(SettingError, match=r"has the algorithm EC_SIGN_P384_SHA384\. Pass a key with EC_SIGN_P256"):
        document.kms_signer(NAME, client)
    answers.status = grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(NotReached, match=r"Cloud KMS refused get_public_key of .*: 403 no permission"):
        document.kms_signer(NAME, client)


def test_other_keys_are_refused(tmp_path: Path):
    new_key(tmp_path)
    other = rsa.generate_private_key(65537, 2048)
    with pytest.raises(SettingError, match="neither an Ed25519 key nor an ECDSA key on P-256"):
        document.public_key(pem(other), "other.pub")
    with pytest.raises(SettingError, match="is not a private key in PEM form"):
        document.file_signer(str(tmp_path / "key.pub"))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "rsa.pem").write_bytes(other.private_bytes(*form))
    with pytest.raises(SettingError, match=r"is not an Ed25519 key\. Create one: openssl genpkey"):
        document.file_signer(str(tmp_path / "rsa.pem"))
    with pytest.raises(SettingError, match="none cannot be read: No such file"):
        document.file_signer("none")
