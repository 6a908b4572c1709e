"""The form of a certificate: an in-toto statement in the form of RFC 8785, signed in a DSSE envelope.

DSSE signs the bytes of the statement and their type, so a tool checks them without parsing JSON, and openssl can check
a signature in the form in which Cloud KMS returns it. JWS has another form for ECDSA.
https://github.com/secure-systems-lab/dsse, https://github.com/in-toto/attestation/tree/main/spec/v1
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import rfc8785

from outbox.base.times import shown
from outbox.base.values import counted
from outbox.errors import OutboxError
from outbox_pipeline.jobs.certificate.keys import PublicKey, Signer

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


@dataclass(frozen=True)
class Certificate:
    """A certificate whose signature was verified. `where` is its file."""

    where: str
    payload: bytes
    content: Mapping[str, Any]
    files: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Return the digest that names it, which does not depend on the signature."""
        return hashlib.sha256(self.payload).hexdigest()

    @property
    def since(self) -> datetime:
        """Return the start of the window."""
        return datetime.fromisoformat(self.content["window"]["since"])

    @property
    def until(self) -> datetime:
        """Return the end of the window."""
        return datetime.fromisoformat(self.content["window"]["until"])

    def inputs(self, folder: str) -> dict[str, str]:
        """Return the digests of the inputs in a folder by their names in it."""
        return {name.removeprefix(folder): each for name, each in self.files.items() if name.startswith(folder)}


def verdict(counts: Mapping[str, int]) -> str:
    """Return the first line of a certificate with these counts."""
    tasks = counts["registered"]
    if wrong := [f"{counts[name]:,} {text}" for name, text in OUTCOMES.items() if text and counts[name]]:
        return f"INCOMPLETE: {' and '.join(wrong)} of {counted(tasks, 'task')}"
    cancelled = f", and {counts['cancelled']:,} cancelled" if counts["cancelled"] else ""
    return f"COMPLETE: {counted(tasks - counts['cancelled'], 'task')} delivered{cancelled}"


def payload(content: Mapping[str, Any], files: Mapping[str, str]) -> bytes:
    """Return the bytes that are signed."""
    subject = [{"name": name, "digest": {"sha256": files[name]}} for name in sorted(files)]
    predicate = {**content, "summary": verdict(content["counts"])}
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


def payload_of(text: bytes, where: str) -> bytes:
    """Return the payload of a certificate without verifying it. Raises OutboxError."""
    return _envelope(text, where)[0]


def _envelope(text: bytes, where: str) -> tuple[bytes, str, bytes]:
    try:
        outer = json.loads(text)
        kind, [one] = outer["payloadType"], outer["signatures"]
        parts = (base64.b64decode(outer["payload"]), str(one["keyid"]), base64.b64decode(one["sig"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OutboxError(f"{where} is not a certificate: {type(error).__name__}: {error}") from None
    if kind != PAYLOAD_TYPE:
        raise OutboxError(f"{where} has the payload type {kind!r}, but a certificate has {PAYLOAD_TYPE!r}")
    return parts


def verified(text: bytes, where: str, keys: Sequence[PublicKey]) -> Certificate:
    """Return the certificate in a text. Raises OutboxError if a byte of it differs from what was signed."""
    data, keyid, signature = _envelope(text, where)
    key = next((each for each in keys if each.id == keyid), None)
    if key is None:
        given = ", ".join(each.id for each in keys)
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
        found = Certificate(where, data, content, files)
        _check_counts(content, where)
        _ = found.since, found.until, content["database"], content["previous"], content["tasks"]["root"]
        if payload(content, files) != data:
            raise OutboxError(f"{where} is not in the form of RFC 8785, or is no certificate of version 1")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise OutboxError(f"{where} has no valid content: {type(error).__name__}: {error}") from None
    return found


def _check_counts(content: Mapping[str, Any], where: str) -> None:
    totals, topics = content["counts"], content["topics"]
    for name, counts in {"all topics": totals, **topics}.items():
        if counts["registered"] != sum(counts[each] for each in OUTCOMES):
            raise OutboxError(f"{where}: the outcomes of {name} do not add up to {counts['registered']:,} tasks")
    for each in ("registered", *OUTCOMES):
        if totals[each] != sum(counts[each] for counts in topics.values()):
            raise OutboxError(f"{where}: the count {each} of the topics does not add up to {totals[each]:,}")


def check_chain(before: Certificate, after: Certificate) -> None:
    """Check that a certificate follows another one. Raises OutboxError."""
    if before.digest == after.digest:
        raise OutboxError(f"{before.where} and {after.where} are the same certificate. Pass it once")
    check_next(before, after.where, after.content["database"], after.since)
    if after.content["previous"] != before.digest:
        raise OutboxError(
            f"{after.where} follows the certificate {after.content['previous']}, but {before.where} is {before.digest}"
        )


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
