"""The outbox in a browser: `outbox.admin` does the work, the console shows it.

`app` returns an ASGI application. `outbox console` serves it, and any ASGI application can mount it. Importing this
package needs no extra; `app` needs `spanner-outbox[console]`.
"""

from typing import TYPE_CHECKING

from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox.console.application import app
    from outbox.console.roles import Header, Iap

__all__ = ["Header", "Iap", "app"]
__getattr__ = importer(__name__, {"application": "app", "roles": "Header Iap"})
