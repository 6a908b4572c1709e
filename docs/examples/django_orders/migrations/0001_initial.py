"""Creates the tables of the service. Those of the outbox exist already."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """The first migration."""

    initial = True
    operations = [  # noqa: RUF012 - as Django writes it
        migrations.CreateModel(
            "Order",
            [
                ("order_id", models.CharField(max_length=36, primary_key=True)),
                ("item", models.CharField(max_length=100)),
                ("cents", models.BigIntegerField()),
            ],
        ),
        migrations.CreateModel(
            "Invoice",
            [
                ("task_id", models.CharField(max_length=64, primary_key=True)),
                ("order_id", models.CharField(max_length=36)),
                ("cents", models.BigIntegerField()),
            ],
        ),
    ]
