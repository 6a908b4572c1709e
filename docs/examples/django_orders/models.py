"""The tables of the service."""

from django.db import models


class Order(models.Model):
    """An order."""

    order_id = models.CharField(max_length=36, primary_key=True)
    item = models.CharField(max_length=100)
    cents = models.BigIntegerField()

    def __str__(self) -> str:
        """Return the order's ID."""
        return self.order_id


class Invoice(models.Model):
    """An invoice. Its key is the task ID, so a second delivery inserts no second row."""

    task_id = models.CharField(max_length=64, primary_key=True)
    order_id = models.CharField(max_length=36)
    cents = models.BigIntegerField()

    def __str__(self) -> str:
        """Return the task's ID."""
        return self.task_id
