"""The types of the values that flags, fields of forms and addresses have."""

from outbox.base.values import MAX_ID_CHARACTERS
from outbox.program.settings import SettingType, matching, whole_number

MAX_TOPIC_CHARACTERS = 400


def _text(longest: int) -> SettingType:
    # An argument that is not valid UTF-8 has surrogates.
    return matching(rf"[^\ud800-\udfff]{{1,{longest}}}", f"1 to {longest:,} characters of valid Unicode")


TOPIC, ID, TEXT, KEY = _text(MAX_TOPIC_CHARACTERS), _text(MAX_ID_CHARACTERS), _text(1_000), _text(1_024)
LIMIT, RATE = whole_number(1, 100_000), whole_number(1, 1_000_000)
