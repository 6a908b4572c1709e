"""The data of a message as people read it."""

import codecs
import contextlib
import json
import re
import unicodedata

from outbox.program.terminal import escaped

#: Bytes of a message's data that people see. `outbox show --raw` writes all.
SHOWN_BYTES = 64 * 1024
#: Max levels of JSON that are indented. A text that is nested deeply would get thousands of times as long as it is.
MAX_LEVELS = 16
#: The tokens of a JSON text: texts, empty objects and arrays, punctuation, and other values.
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|\{\s*\}|\[\s*\]|[{}\[\]:,]|[^\s{}\[\]:,"]+')


def readable(data: bytes) -> tuple[str, list[str], int]:
    """Return the kind of a message's data (JSON, text or hex), escaped lines, and how many bytes they leave out."""
    data, more = data[:SHOWN_BYTES], max(0, len(data) - SHOWN_BYTES)
    try:
        # SHOWN_BYTES may cut the last character.
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=not more)
    except UnicodeDecodeError:
        text = "\0"
    if any(unicodedata.category(each) == "Cc" and each not in "\n\r\t" for each in text):
        return "hex", [data[start : start + 32].hex(" ") for start in range(0, len(data), 32)], more
    kind, lines = "text", text.expandtabs().splitlines()
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(text)
        kind, lines = "JSON", _indented(text)
    return kind, [escaped(line) for line in lines], more


def _indented(text: str) -> list[str]:
    """Return the lines of a JSON text. Numbers and repeated names stay as written: Python would write 1.10 as 1.1."""
    lines, depth = [""], 0
    for match in _TOKENS.finditer(text):
        written = match[0]
        is_text = written[0] == '"'
        token = json.dumps(json.loads(written), ensure_ascii=False) if is_text else "".join(written.split())
        if token in ("}", "]"):
            depth -= 1
            lines.append("  " * min(depth, MAX_LEVELS))
        lines[-1] += {":": ": "}.get(token, token)
        depth += token in ("{", "[")
        if token in ("{", "[", ","):
            lines.append("  " * min(depth, MAX_LEVELS))
    return lines
