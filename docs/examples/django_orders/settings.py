"""The settings of the example. The outbox's variables name the database."""

import os

DATABASES = {
    "default": {
        "ENGINE": "django_spanner",
        "PROJECT": os.environ["OUTBOX_PROJECT"],
        "INSTANCE": os.environ["OUTBOX_INSTANCE"],
        "NAME": os.environ["OUTBOX_DATABASE"],
    },
}
# The driver reads the project only from this variable.
os.environ["GOOGLE_CLOUD_PROJECT"] = os.environ["OUTBOX_PROJECT"]
INSTALLED_APPS = ["django_spanner", "django_orders"]
ROOT_URLCONF = "django_orders.views"
ALLOWED_HOSTS = ["localhost", "testserver"]
SECRET_KEY = "only for this example"  # noqa: S105 - it protects nothing here
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
USE_TZ = True
#: The topic of the orders: a topic ID, or projects/P/topics/T.
TOPIC = os.environ.get("TOPIC", "orders")
