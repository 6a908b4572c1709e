"""`POST /orders` inserts an order and registers its task. Both are committed, or neither."""

import json
import uuid

from django.conf import settings
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.http import require_POST

from django_orders.models import Order
from outbox.ext import django as outbox_django


class Unavailable(Exception):
    """The item cannot be ordered."""


@require_POST
def place_order(request: HttpRequest) -> JsonResponse:
    """Place an order of the item and the cents in the body."""
    order = json.loads(request.body)
    try:
        placed = outbox_django.run_in_transaction(_place, order["item"], order["cents"])
    except Unavailable:
        return JsonResponse({"detail": "this item is not available"}, status=409)
    return JsonResponse(placed, status=201)


def _place(item: str, cents: int) -> dict[str, str]:
    order = Order.objects.create(order_id=str(uuid.uuid4()), item=item, cents=cents)
    message = json.dumps({"order_id": order.order_id, "cents": cents}).encode()
    task_id = outbox_django.register(settings.TOPIC, message, attributes={"kind": "order-placed"})
    if item == "unavailable":  # a fault after `register`: the task is rolled back with the order
        raise Unavailable
    return {"order_id": order.order_id, "task_id": task_id}


urlpatterns = [path("orders", place_order)]
