locals {
  # Workload Identity Federation: a role for the Kubernetes service account, without a key or a Google service account.
  pool    = "projects/${var.project_number}/locations/global/workloadIdentityPools/${var.project}.svc.id.goog"
  account = "principal://iam.googleapis.com/${local.pool}/subject/ns/${var.namespace}/sa"
  worker  = "${local.account}/publishworker"
  console = "${local.account}/outbox-console"
  # One entry for each database role of a member.
  database_roles = {
    for pair in concat(
      [{ role = "publishworker", member = local.worker }],
      [{ role = var.console_actions ? "outbox_operator" : "outbox_viewer", member = local.console }],
      [for member in var.applications : { role = "outbox_application", member = member }],
      [for member in var.operators : { role = "outbox_operator", member = member }],
      [for member in var.viewers : { role = "outbox_viewer", member = member }],
    ) : "${pair.role} ${pair.member}" => pair
  }
  # Pub/Sub forwards dead letters as this service agent.
  pubsub = "serviceAccount:service-${var.project_number}@gcp-sa-pubsub.iam.gserviceaccount.com"
  # Names of subscriptions are unique in a project.
  subscriptions = merge([for topic, names in var.topics : { for name in names : name => topic }]...)
}

# A grant may only use the database, and the other one names the roles that it may assume there (schema/roles.sql).
resource "google_spanner_database_iam_member" "database_users" {
  for_each = toset(values(local.database_roles)[*].member)

  project  = var.project
  instance = var.instance
  database = var.database
  role     = "roles/spanner.fineGrainedAccessUser"
  member   = each.value
}

resource "google_spanner_database_iam_member" "database_roles" {
  for_each = local.database_roles

  project  = var.project
  instance = var.instance
  database = var.database
  role     = "roles/spanner.databaseRoleUser"
  member   = each.value.member

  condition {
    title      = each.value.role
    expression = "resource.type == \"spanner.googleapis.com/DatabaseRole\" && resource.name.endsWith(\"/${each.value.role}\")"
  }
}

resource "google_pubsub_topic" "topics" {
  for_each = var.topics

  project      = var.project
  name         = each.key
  kms_key_name = var.kms_key_name
}

# Takes the role from all others. An application that publishes by itself bypasses the outbox.
resource "google_pubsub_topic_iam_binding" "only_the_worker_publishes" {
  for_each = google_pubsub_topic.topics

  project = var.project
  topic   = each.value.name
  role    = "roles/pubsub.publisher"
  members = setunion([local.worker], var.publishers)
}

# For `publishworker check`, which verifies that a topic exists.
resource "google_pubsub_topic_iam_member" "worker_checks" {
  for_each = google_pubsub_topic.topics

  project = var.project
  topic   = each.value.name
  role    = "roles/pubsub.viewer"
  member  = local.worker
}

resource "google_pubsub_topic" "dead_letters" {
  for_each = local.subscriptions

  project      = var.project
  name         = "${each.key}-dead-letters"
  kms_key_name = var.kms_key_name
}

# Without a subscription, Pub/Sub would discard the dead letters.
resource "google_pubsub_subscription" "dead_letters" {
  for_each = google_pubsub_topic.dead_letters

  project                    = var.project
  name                       = each.value.name
  topic                      = each.value.id
  message_retention_duration = "604800s"

  expiration_policy {
    ttl = ""
  }
}

resource "google_pubsub_subscription" "subscriptions" {
  for_each = local.subscriptions

  project                 = var.project
  name                    = each.key
  topic                   = google_pubsub_topic.topics[each.value].id
  enable_message_ordering = true

  dead_letter_policy {
    dead_letter_topic     = google_pubsub_topic.dead_letters[each.key].id
    max_delivery_attempts = var.max_delivery_attempts
  }

  expiration_policy {
    ttl = ""
  }

  retry_policy {
    minimum_backoff = "10s"
    maximum_backoff = "600s"
  }
}

resource "google_pubsub_topic_iam_member" "forwards_dead_letters" {
  for_each = google_pubsub_topic.dead_letters

  project = var.project
  topic   = each.value.name
  role    = "roles/pubsub.publisher"
  member  = local.pubsub
}

resource "google_pubsub_subscription_iam_member" "acknowledges_dead_letters" {
  for_each = google_pubsub_subscription.subscriptions

  project      = var.project
  subscription = each.value.name
  role         = "roles/pubsub.subscriber"
  member       = local.pubsub
}

# One account for each subscriber, so that it can read its own subscription only.
resource "google_service_account" "subscribers" {
  for_each = local.subscriptions

  project      = var.project
  account_id   = "sub-${each.key}"
  display_name = "Subscriber ${each.key}"
}

resource "google_pubsub_subscription_iam_member" "subscribers" {
  for_each = google_pubsub_subscription.subscriptions

  project      = var.project
  subscription = each.value.name
  role         = "roles/pubsub.subscriber"
  member       = google_service_account.subscribers[each.key].member
}
