"""Avro files as a Cloud Storage subscription writes them, with metadata, in the schema that Google documents."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import fastavro

#: https://cloud.google.com/pubsub/docs/create-cloudstorage-subscription#file_format
SCHEMA = {
    "type": "record",
    "namespace": "com.google.pubsub",
    "name": "PubsubMessageWithMetadata",
    "fields": [
        {"name": "subscription_name", "type": "string"},
        {"name": "message_id", "type": "string"},
        {"name": "publish_time", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "attributes", "type": {"type": "map", "values": "string"}},
        {"name": "data", "type": "bytes"},
    ],
}


def avro_message(id: str, at: datetime, attributes: Mapping[str, str], data: bytes = b"") -> dict[str, Any]:
    return {
        "subscription_name": "projects/p/subscriptions/audit",
        "message_id": id,
        "publish_time": at,
        "attributes": attributes,
        "data": data,
    }


def write_avro(path: Path, messages: Sequence[dict[str, Any]], schema: Mapping[str, Any] = SCHEMA) -> None:
    with path.open("wb") as file:
        fastavro.writer(file, dict(schema), messages, codec="deflate")
