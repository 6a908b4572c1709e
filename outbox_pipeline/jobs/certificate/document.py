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

from outbox.base.values import counted, shown
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
#: The fields that do not follow from `topics`.
_FIELDS = ("audit", "database", "not_delivered", "previous", "tasks", "window")


@dataclass(frozen=True)
class Certificate:
    """A certificate in the file `where`. `digest` names it, and does not depend on the signature."""

    where: str
    digest: str
    since: datetime
    until: datetime
    content: Mapping[str, Any]
    files: Mapping[str, str]

    def inputs(self, folder: str) -> dict[str, str]:
        """Return the digests of the inputs in a folder by their names in it."""
        return {name.removeprefix(folder): each for name, each in self.files.items() if name.startswith(folder)}


def _verdict(counts: Mapping[str, int]) -> str:
    """Return the first line of a certificate with these counts."""
    tasks = counts["registered"]
    if wrong := [f"{counts[name]:,} {text}" for name, text in OUTCOMES.items() if text and counts[name]]:
        return f"INCOMPLETE: {' and '.join(wrong)} of {counted(tasks, 'task')}"
    cancelled = f", and {counts['cancelled']:,} cancelled" if counts["cancelled"] else ""
    return f"COMPLETE: {counted(tasks - counts['cancelled'], 'task')} delivered{cancelled}"


def payload(content: Mapping[str, Any], files: Mapping[str, str]) -> bytes:
    """Return the bytes that are signed. The sums and the summary follow from `topics`."""
    topics, counts = {}, {name: content["counts"][name] for name in ("unknown", "foreign")}
    for topic, found in content["topics"].items():
        topics[topic] = {name: found[name] for name in (*OUTCOMES, "republished")}
        topics[topic]["registered"] = sum(found[name] for name in OUTCOMES)
    for name in ("registered", *OUTCOMES, "republished"):
        counts[name] = sum(each[name] for each in topics.values())
    predicate = {name: content[name] for name in _FIELDS}
    predicate |= {"topics": topics, "counts": counts, "summary": _verdict(counts)}
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


def verified(text: bytes, where: str, keys: Sequence[PublicKey]) -> Certificate:
    """Return the certificate in a text. Raises OutboxError if a byte of it differs from what was signed."""
    data, keyid, signature = envelope(text, where)
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
        if value != again.get(name):
            return f"{name} is unknown, or does not follow from the other fields"
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


def check_chain(before: Certificate, after: Certificate) -> None:
    """Check that a certificate follows another one. Raises OutboxError."""
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
