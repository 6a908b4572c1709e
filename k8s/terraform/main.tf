locals {
  # Workload Identity Federation: a role for the Kubernetes service account, without a key or a Google service account.
  pool     = "projects/${var.project_number}/locations/global/workloadIdentityPools/${var.project}.svc.id.goog"
  account  = "principal://iam.googleapis.com/${local.pool}/subject/ns/${var.namespace}/sa"
  worker   = coalesce(var.worker, "${local.account}/${var.service}")
  console  = "${local.account}/${var.console_account}"
  jobs     = "${local.account}/${var.job_account}"
  pipeline = coalesce(var.pipeline, "principal://iam.googleapis.com/${local.pool}/subject/ns/${var.pipeline_namespace}/sa/${var.pipeline_account}")
  # One entry for each member with its database role. The keys do not depend on other resources, so Terraform knows them
  # before it has created the members' accounts.
  database_roles = merge(
    {
      worker  = { role = "publishworker", member = local.worker }
      console = { role = var.console_actions ? "outbox_operator" : "outbox_viewer", member = local.console }
    },
    { for name in var.jobs ? ["jobs"] : [] : name => { role = "outbox_operator", member = local.jobs } },
    { for name in var.spark ? ["spark"] : [] : name => { role = "outbox_pipeline", member = local.pipeline } },
    { for name, member in var.applications : "application ${name}" => { role = "outbox_application", member = member } },
    { for name, member in var.operators : "operator ${name}" => { role = "outbox_operator", member = member } },
    { for name, member in var.viewers : "viewer ${name}" => { role = "outbox_viewer", member = member } },
    # The inbox in this database.
    { for name, topic in local.subscriptions : "subscriber ${name}" => {
      role = "outbox_subscriber", member = google_service_account.subscribers[name].member
    } if var.inbox },
  )
  # Pub/Sub forwards dead letters as this service agent.
  pubsub = "serviceAccount:service-${var.project_number}@gcp-sa-pubsub.iam.gserviceaccount.com"
  # Names of subscriptions are unique in a project.
  subscriptions = merge([for topic, names in var.topics : { for name in names : name => topic }]...)
}

# A grant may only use the database, and the other one names the roles that it may assume there (schema/roles.sql).
resource "google_spanner_database_iam_member" "database_users" {
  for_each = local.database_roles

  project  = var.project
  instance = var.instance
  database = var.database
  role     = "roles/spanner.fineGrainedAccessUser"
  member   = each.value.member
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
  for_each = var.topics

  project = var.project
  topic   = google_pubsub_topic.topics[each.key].name
  role    = "roles/pubsub.publisher"
  members = setunion([local.worker], var.publishers)

  # A new topic or subscription of the same name has no grants.
  lifecycle {
    replace_triggered_by = [google_pubsub_topic.topics[each.key].id]
  }
}

# For `publishworker check`, which verifies that a topic exists.
resource "google_pubsub_topic_iam_member" "worker_checks" {
  for_each = var.topics

  project = var.project
  topic   = google_pubsub_topic.topics[each.key].name
  role    = "roles/pubsub.viewer"
  member  = local.worker

  # A new topic or subscription of the same name has no grants.
  lifecycle {
    replace_triggered_by = [google_pubsub_topic.topics[each.key].id]
  }
}

resource "google_pubsub_topic" "dead_letters" {
  for_each = local.subscriptions

  project      = var.project
  name         = "${each.key}-dead-letters"
  kms_key_name = var.kms_key_name
}

# Without a subscription, Pub/Sub would discard the dead letters.
resource "google_pubsub_subscription" "dead_letters" {
  for_each = local.subscriptions

  project                    = var.project
  name                       = google_pubsub_topic.dead_letters[each.key].name
  topic                      = google_pubsub_topic.dead_letters[each.key].id
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
  for_each = local.subscriptions

  project = var.project
  topic   = google_pubsub_topic.dead_letters[each.key].name
  role    = "roles/pubsub.publisher"
  member  = local.pubsub

  # A new topic or subscription of the same name has no grants.
  lifecycle {
    replace_triggered_by = [google_pubsub_topic.dead_letters[each.key].id]
  }
}

resource "google_pubsub_subscription_iam_member" "acknowledges_dead_letters" {
  for_each = local.subscriptions

  project      = var.project
  subscription = google_pubsub_subscription.subscriptions[each.key].name
  role         = "roles/pubsub.subscriber"
  member       = local.pubsub

  # A new topic or subscription of the same name has no grants.
  lifecycle {
    replace_triggered_by = [google_pubsub_subscription.subscriptions[each.key].id]
  }
}

# One account for each subscriber, so that it can read its own subscription only.
resource "google_service_account" "subscribers" {
  for_each = local.subscriptions

  project      = var.project
  account_id   = "${var.subscriber_prefix}${each.key}"
  display_name = "Subscriber ${each.key}"

  lifecycle {
    precondition {
      condition     = length("${var.subscriber_prefix}${each.key}") <= 30
      error_message = "An account's name has at most 30 characters. Choose a shorter subscriber_prefix or subscription."
    }
  }
}

resource "google_pubsub_subscription_iam_member" "subscribers" {
  for_each = local.subscriptions

  project      = var.project
  subscription = google_pubsub_subscription.subscriptions[each.key].name
  role         = "roles/pubsub.subscriber"
  member       = google_service_account.subscribers[each.key].member

  # A new topic or subscription of the same name has no grants.
  lifecycle {
    replace_triggered_by = [google_pubsub_subscription.subscriptions[each.key].id]
  }
}

# `archive`, `audit` and `replay` read and write files.
resource "google_storage_bucket_iam_member" "pipeline" {
  for_each = var.buckets

  bucket = each.value
  role   = "roles/storage.objectUser"
  member = local.pipeline
}

# The Spark job `drain` publishes like a worker.
resource "google_pubsub_topic_iam_member" "pipeline_publishes" {
  for_each = var.pipeline_drains ? var.topics : {}

  project = var.project
  topic   = google_pubsub_topic.topics[each.key].name
  role    = "roles/pubsub.publisher"
  member  = local.pipeline

  lifecycle {
    replace_triggered_by = [google_pubsub_topic.topics[each.key].id]
  }
}
