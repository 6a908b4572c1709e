locals {
  datadog  = "${path.module}/../datadog"
  monitors = var.env == null ? toset([]) : fileset("${local.datadog}/monitors", "*.json")
}

resource "datadog_dashboard_json" "outbox" {
  count = var.env == null ? 0 : 1

  dashboard = templatefile("${local.datadog}/dashboard.json", { docs_url = var.docs_url })
}

resource "datadog_monitor_json" "outbox" {
  for_each = local.monitors

  monitor = replace(
    replace(
      templatefile("${local.datadog}/monitors/${each.value}", { docs_url = var.docs_url }),
      "env:production", "env:${coalesce(var.env, "production")}"
    ),
    "my-project", var.project
  )
}
