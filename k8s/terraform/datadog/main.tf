# Dashboard, monitors and objective of a release in Datadog: docs/operations/monitoring.md. Apart from the module above,
# because Terraform configures the provider, which needs keys, also if there is nothing to create.
terraform {
  required_version = ">= 1.5"
  required_providers {
    datadog = { source = "DataDog/datadog", version = ">= 3.40, < 5.0" }
  }
}

locals {
  datadog  = "${path.module}/../../datadog"
  monitors = fileset("${local.datadog}/monitors", "*.json")
  values   = { docs_url = var.docs_url, slo_id = "$${slo_id}" }
  files    = merge({ for file in local.monitors : file => "monitors/${file}" }, { for name in ["dashboard", "slo", "burn-rate"] : name => "${name}.json" })
  # The files have the names of one release. Each release has its own dashboard, monitors and objective.
  texts = {
    for name, file in local.files : name => replace(replace(replace(replace(replace(replace(replace(replace(replace(
      templatefile("${local.datadog}/${file}", local.values),
      "my-project", var.project),
      "env:production", "env:${var.env}"),
      "service:publishworker", "service:${var.service}"),
      "service:outbox-pipeline", "service:${var.pipeline_account}"),
      "horizontalpodautoscaler:publishworker", "horizontalpodautoscaler:${var.service}"),
      "\"Outbox: publishworker\"", "\"Outbox: overview\""),
      "[\"production\"]", "[\"${var.env}\"]"),
      "[\"publishworker\"]", "[\"${var.service}\"]"),
    "\"Outbox: ", "\"Outbox ${var.service}, ${var.env}: ")
  }
  slo = jsondecode(local.texts["slo"])
}

resource "datadog_dashboard_json" "outbox" {
  dashboard = local.texts["dashboard"]
}

resource "datadog_monitor_json" "outbox" {
  for_each = local.monitors

  monitor = local.texts[each.value]
}

resource "datadog_service_level_objective" "outbox" {
  name        = local.slo.name
  type        = local.slo.type
  description = local.slo.description
  tags        = local.slo.tags

  sli_specification {
    time_slice {
      comparator             = local.slo.sli_specification.time_slice.comparator
      threshold              = local.slo.sli_specification.time_slice.threshold
      query_interval_seconds = local.slo.sli_specification.time_slice.query_interval_seconds

      query {
        formula {
          formula_expression = local.slo.sli_specification.time_slice.query.formulas[0].formula
        }

        query {
          metric_query {
            name  = local.slo.sli_specification.time_slice.query.queries[0].name
            query = local.slo.sli_specification.time_slice.query.queries[0].query
          }
        }
      }
    }
  }

  thresholds {
    timeframe = local.slo.thresholds[0].timeframe
    target    = local.slo.thresholds[0].target
  }
}

resource "datadog_monitor_json" "burn_rate" {
  monitor = replace(local.texts["burn-rate"], "$${slo_id}", datadog_service_level_objective.outbox.id)
}
