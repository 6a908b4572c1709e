"""The daily certificate: a signed document about one closed window, which `audit --certificate` writes. Needs no Spark.

It is an in-toto statement in the form of RFC 8785, signed in a DSSE envelope. DSSE signs the bytes of the statement and
their type, so a tool checks them without parsing JSON, and openssl can check a signature in the form in which Cloud KMS
returns it. JWS has another form for ECDSA.
https://github.com/secure-systems-lab/dsse, https://github.com/in-toto/attestation/tree/main/spec/v1

The key is an Ed25519 key in a file, or an ECDSA key on P-256 in Cloud KMS.
"""

import argparse
import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import rfc8785
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from outbox.base.start import need
from outbox.base.values import counted, shown
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.program.terminal import say

ALGORITHM = "EC_SIGN_P256_SHA256"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "urn:spanner-outbox:certificate:v1"
#: Each task has one outcome, described in docs/pipeline/certificate.md. Those with a text make the window incomplete.
OUTCOMES = {
    "delivered": "", "late": "", "lost": "lost", "mismatched": "received with other content", "pending": "pending",
    "dead": "dead", "cancelled": "",
}  # fmt: skip
#: Max tasks that a certificate lists because they were not delivered. It counts all of them.
MOST_LISTED = 1_000
#: The folders of the names of inputs.
ARCHIVE, RECEIVED = "archive/", "received/"
#: The fields that do not follow from `topics`. A field that is added here is optional: earlier certificates lack it.
_FIELDS = ("audit", "database", "uncertainties", "not_delivered", "previous", "window")
#: Files that are no inputs: their names begin with a dot or _, or they are in the log of the archive.
_NO_INPUTS = re.compile(r"(^|/)[._][^/]*$|^_delta_log/")


@dataclass(frozen=True)
class PublicKey:
    """A key that verifies signatures. Its ID is the SHA-256 of its DER form."""

    key: Ed25519PublicKey | EllipticCurvePublicKey

    @property
    def id(self) -> str:
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return hashlib.sha256(self.key.public_bytes(serialization.Encoding.DER, form)).hexdigest()

    def verifies(self, signature: bytes, data: bytes) -> bool:
        try:
            if isinstance(self.key, Ed25519PublicKey):
                self.key.verify(signature, data)
            else:
                self.key.verify(signature, data, ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class Signer:
    public: PublicKey
    sign: Callable[[bytes], bytes]


def public_key(pem: bytes, where: str) -> PublicKey:
    """Return a public key. Raises SettingError."""
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingError(f"{where} is not a public key in PEM form: {error}") from None
    if isinstance(key, Ed25519PublicKey) or (
        isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)
    ):
        return PublicKey(key)
    raise SettingError(f"{where} is neither an Ed25519 key nor an ECDSA key on P-256")


def file_signer(path: str) -> Signer:
    """Return the signer with the private key in a file. Raises SettingError."""
    try:
        key = serialization.load_pem_private_key(contents(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingError(f"{path} is not a private key in PEM form without a password: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingError(f"{path} is not an Ed25519 key. Create one: openssl genpkey -algorithm ed25519 -out {path}")
    return Signer(PublicKey(key.public_key()), key.sign)


def kms_signer(name: str, client: Any = None) -> Signer:
    """Return the signer with a key version in Cloud KMS. Raises SettingError, OutboxError, NotReached."""
    need("google.cloud.kms", "--kms-key", "kms")
    from google.api_core.exceptions import GoogleAPIError  # noqa: PLC0415 - with the package of the extra
    from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415 - the same
    from google.cloud import kms  # noqa: PLC0415 - the same

    def asked(method: str, **request: Any) -> Any:
        try:
            return getattr(service, method)(request={"name": name, **request}, timeout=60)
        except GoogleAPIError as error:
            raise NotReached(f"Cloud KMS refused {method} of {name}: {error}") from error

    def sign(data: bytes) -> bytes:
        # The signature only matches if neither the request nor the answer was damaged, so it needs no CRC32C.
        signature: bytes = asked("asymmetric_sign", digest={"sha256": hashlib.sha256(data).digest()}).signature
        if not public.verifies(signature, data):
            raise NotReached(f"Cloud KMS returned a signature that is not of {name}. Run the audit again")
        return signature

    try:
        service = client or kms.KeyManagementServiceClient()
    except GoogleAuthError as error:
        raise NotReached(f"Cloud KMS cannot be used: {error}") from error
    found = asked("get_public_key")
    if found.algorithm.name != ALGORITHM:
        raise SettingError(f"--kms-key {name} has the algorithm {found.algorithm.name}. Pass a key with {ALGORITHM}")
    public = public_key(found.pem.encode(), name)
    return Signer(public, sign)


def contents(path: str | Path) -> bytes:
    """Return the contents of a local file. Raises SettingError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Certificate:
    """A certificate in the file `where`. `digest` names it, and does not depend on the signature."""

    where: str
    digest: str
    since: datetime
    until: datetime
    content: Mapping[str, Any]
    files: Mapping[str, str]

    @property
    def is_complete(self) -> bool:
        """Tell whether all tasks were delivered or cancelled, and no known fact can hide a loss."""
        return str(self.content["summary"]).startswith("COMPLETE:")


def _verdict(counts: Mapping[str, int], uncertainties: Sequence[str]) -> str:
    """Return the first line of a certificate with these counts, and these facts that can hide a loss."""
    tasks, unknown = counts["registered"], counts["unknown"]
    facts = [*uncertainties, *([f"no task has the ID of {counted(unknown, 'received message')}"] if unknown else [])]
    hidden = f". A loss may be hidden: {'; '.join(facts)}" if facts else ""
    if wrong := [f"{counts[name]:,} {text}" for name, text in OUTCOMES.items() if text and counts[name]]:
        return f"INCOMPLETE: {' and '.join(wrong)} of {counted(tasks, 'task')}{hidden}"
    cancelled = f", and {counts['cancelled']:,} cancelled" if counts["cancelled"] else ""
    verdict = "UNCERTAIN" if facts else "COMPLETE"
    return f"{verdict}: {counted(tasks - counts['cancelled'], 'task')} delivered{cancelled}{hidden}"


def payload(content: Mapping[str, Any], files: Mapping[str, str]) -> bytes:
    """Return the bytes that are signed. The sums and the summary follow from `topics`. Raises ValueError."""
    if unknown := sorted(content.keys() - {*_FIELDS, "topics", "counts", "summary"}):
        raise ValueError(f"{unknown[0]} is unknown")
    topics, counts = {}, {name: content["counts"][name] for name in ("unknown", "foreign")}
    for topic, found in content["topics"].items():
        topics[topic] = {name: found[name] for name in (*OUTCOMES, "republished")}
        topics[topic]["registered"] = sum(found[name] for name in OUTCOMES)
    for name in ("registered", *OUTCOMES, "republished"):
        counts[name] = sum(each[name] for each in topics.values())
    predicate = {name: content[name] for name in _FIELDS}
    predicate |= {"topics": topics, "counts": counts, "summary": _verdict(counts, content["uncertainties"])}
    subject = [{"name": name, "digest": {"sha256": files[name]}} for name in sorted(files)]
    statement: Any = {"_type": _STATEMENT, "subject": subject, "predicateType": _PREDICATE, "predicate": predicate}
    return rfc8785.dumps(statement)


def signed(data: bytes, signer: Signer) -> str:
    """Return the text of a certificate. Its first line has the summary."""
    return _text(data, signer.public.id, signer.sign(encoded(data)))


def encoded(data: bytes) -> bytes:
    """Return the bytes that a DSSE envelope signs for a payload."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(data), data)


def _text(data: bytes, keyid: str, signature: bytes) -> str:
    fields = {
        "summary": json.loads(data)["predicate"]["summary"],
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(data).decode(),
        "signatures": [{"keyid": keyid, "sig": base64.b64encode(signature).decode()}],
    }
    return "{" + ",\n ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()) + "}\n"


def envelope(text: bytes, where: str) -> tuple[bytes, str, bytes]:
    """Return the payload of a certificate, the ID of its key, and the signature, unverified. Raises OutboxError."""
    try:
        outer = json.loads(text)
        kind, [one] = outer["payloadType"], outer["signatures"]
        parts = (base64.b64decode(outer["payload"]), str(one["keyid"]), base64.b64decode(one["sig"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OutboxError(f"{where} is not a certificate: {type(error).__name__}: {error}") from None
    if kind != PAYLOAD_TYPE:
        raise OutboxError(f"{where} has the payload type {kind!r}, but a certificate has {PAYLOAD_TYPE!r}")
    return parts


def verified(text: bytes, where: str, known: Sequence[PublicKey]) -> Certificate:
    """Return the certificate in a text. Raises OutboxError if a byte of it differs from what was signed."""
    data, keyid, signature = envelope(text, where)
    key = next((each for each in known if each.id == keyid), None)
    if key is None:
        given = ", ".join(each.id for each in known)
        raise OutboxError(f"{where} names the key {keyid}, but the public keys given are {given}")
    if not key.verifies(signature, encoded(data)):
        raise OutboxError(f"{where}: the signature does not match the content. One of them was changed")
    certificate = read(data, where)
    if _text(data, keyid, signature).encode() != text:
        raise OutboxError(f"{where}: the content is signed, but other bytes were changed, such as the summary")
    return certificate


def read(data: bytes, where: str) -> Certificate:
    """Return the certificate with a payload, after checking that it is consistent. Raises OutboxError."""
    try:
        statement = json.loads(data)
        content = statement["predicate"]
        files = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        since, until = (datetime.fromisoformat(content["window"][bound]) for bound in ("since", "until"))
        again = payload({**content, "window": {"since": shown(since), "until": shown(until)}}, files)
        fault = _fault(content, json.loads(again)["predicate"])
        if fault or again != data:
            raise OutboxError(f"{where}: {fault or 'the content is not in the form of RFC 8785, or not of version 1'}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise OutboxError(f"{where} has no valid content: {type(error).__name__}: {error}") from None
    return Certificate(where, hashlib.sha256(data).hexdigest(), since, until, content, files)


def _fault(content: Mapping[str, Any], again: Mapping[str, Any]) -> str | None:
    """Return how a content differs from what follows from it, or None."""
    for name, value in content.items():
        if value != again[name]:
            return f"{name} does not follow from the other fields"
    for counts in (again["counts"], *again["topics"].values()):
        for name, number in counts.items():
            if type(number) is not int or number < 0:
                return f"{name} is {number!r}, which is no number of tasks"
    if again["window"]["since"] >= again["window"]["until"]:
        return "the window does not end after its start"
    wrong = sum(again["counts"][name] for name, text in OUTCOMES.items() if text)
    listed = [each["task_id"] for each in again["not_delivered"] if each["outcome"] in OUTCOMES]
    if len(listed) != min(wrong, MOST_LISTED):
        return f"not_delivered lists {len(listed):,} tasks, but {wrong:,} were not delivered"
    return None


def check_next(before: Certificate, where: str, database: str, since: datetime) -> None:
    """Check that a window follows that of a certificate. Raises OutboxError."""
    if before.content["database"] != database:
        raise OutboxError(f"{where} is of {database}, but {before.where} is of {before.content['database']}")
    if before.until != since:
        between = "a gap" if before.until < since else "an overlap"
        raise OutboxError(
            f"There is {between} between {before.where}, which ends at {shown(before.until)}, and {where}, which "
            f"begins at {shown(since)}"
        )


def verify(options: argparse.Namespace) -> int:
    """Verify certificates, their chain and the inputs. Raises OutboxError at the first fault."""
    known = [public_key(contents(path), path) for path in options.public_key]
    chain = sorted((verified(contents(file), file, known) for file in options.files), key=lambda each: each.since)
    for before, after in itertools.pairwise(chain):
        check_next(before, after.where, after.content["database"], after.since)
        if after.content["previous"] != before.digest:
            raise OutboxError(
                f"{after.where} follows the certificate {after.content['previous']}, but {before.where} is "
                f"{before.digest}"
            )
    for kind, folder in ((ARCHIVE, options.archive), (RECEIVED, options.received)):
        if folder:
            _check_files(chain, kind, Path(folder))
    for each in chain:
        say(f"From {shown(each.since)} to {shown(each.until)}, certificate {each.digest}: {each.content['summary']}")
    previous = chain[0].content["previous"]
    first = f"follows {previous}" if previous else "begins the chain"
    say(f"Verified {counted(len(chain), 'certificate')}. The first one {first}")
    return 0


def _check_files(chain: Sequence[Certificate], kind: str, folder: Path) -> None:
    """Check that the files in a folder are those that certificates name, and that their folders have no others."""
    named: dict[str, str] = {}
    for certificate in chain:
        for path, digest in certificate.files.items():
            name = path.removeprefix(kind)
            if name == path:
                continue
            if not (folder / name).is_file():
                raise OutboxError(f"{folder} lacks {name}, which {certificate.where} names")
            if named.get(name) != digest and hashlib.sha256(contents(folder / name)).hexdigest() != digest:
                raise OutboxError(f"{folder}/{name} was changed since {certificate.where}")
            named[name] = digest
    # No file may be added to the run of an archived file, or to the folder of a received one.
    for parent in {"/".join(name.split("/")[:-1][:2]) for name in named}:
        for file in (folder / parent).rglob("*"):
            name = str(file.relative_to(folder))
            if name not in named and file.is_file() and not _NO_INPUTS.search(name):
                raise OutboxError(f"{folder}/{name} was added since {chain[-1].where}")
