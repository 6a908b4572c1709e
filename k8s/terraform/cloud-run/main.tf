# Workers on Cloud Run: docs/operations/cloud-run.md. A worker pool has no port and no probe. It needs provider 7.
terraform {
  required_version = ">= 1.5"
  required_providers {
    google = { source = "hashicorp/google", version = ">= 7.0, < 8.0" }
  }
}

locals {
  settings = merge({
    OUTBOX_LOG_FORMAT     = "json"
    OUTBOX_HEARTBEAT_FILE = "/tmp/publishworker.heartbeat"
    # Cloud Run kills a container 10 s after SIGTERM.
    OUTBOX_SHUTDOWN_TIMEOUT = "5"
  }, var.settings)
}

# Grant it the permissions of a worker: the output `worker` is the variable `worker` of the module above.
resource "google_service_account" "worker" {
  project      = var.project
  account_id   = var.name
  display_name = "Worker of the outbox"
}

resource "google_cloud_run_v2_worker_pool" "worker" {
  count = var.instances > 0 ? 1 : 0

  project             = var.project
  location            = var.region
  name                = var.name
  launch_stage        = var.launch_stage
  deletion_protection = var.deletion_protection

  scaling {
    manual_instance_count = var.instances
  }

  template {
    service_account = google_service_account.worker.email

    containers {
      image = var.image
      args  = ["run"]

      dynamic "env" {
        for_each = local.settings
        content {
          name  = env.key
          value = env.value
        }
      }

      resources {
        limits = { cpu = var.cpu, memory = var.memory }
      }
    }
  }
}

# Sends what is pending and exits, for a few tasks a day.
resource "google_cloud_run_v2_job" "drain" {
  count = var.drain_schedule == null ? 0 : 1

  project             = var.project
  location            = var.region
  name                = "${var.name}-drain"
  deletion_protection = var.deletion_protection

  template {
    template {
      service_account = google_service_account.worker.email
      timeout         = "${var.drain_deadline + 60}s"
      # The next run sends what this one has left.
      max_retries = 0

      containers {
        image = var.image
        args  = ["drain", "--deadline", tostring(var.drain_deadline)]

        dynamic "env" {
          for_each = local.settings
          content {
            name  = env.key
            value = env.value
          }
        }

        resources {
          limits = { cpu = var.cpu, memory = var.memory }
        }
      }
    }
  }
}

resource "google_service_account" "scheduler" {
  count = var.drain_schedule == null ? 0 : 1

  project      = var.project
  account_id   = "${var.name}-schedule"
  display_name = "Starts the drain of the outbox"
}

resource "google_cloud_run_v2_job_iam_member" "scheduler" {
  count = var.drain_schedule == null ? 0 : 1

  project  = var.project
  location = var.region
  name     = google_cloud_run_v2_job.drain[0].name
  role     = "roles/run.invoker"
  member   = google_service_account.scheduler[0].member

  lifecycle {
    replace_triggered_by = [google_cloud_run_v2_job.drain[0].id]
  }
}

resource "google_cloud_scheduler_job" "drain" {
  count = var.drain_schedule == null ? 0 : 1

  project   = var.project
  region    = var.region
  name      = "${var.name}-drain"
  schedule  = var.drain_schedule
  time_zone = "Etc/UTC"

  http_target {
    http_method = "POST"
    uri         = "https://run.googleapis.com/v2/projects/${var.project}/locations/${var.region}/jobs/${google_cloud_run_v2_job.drain[0].name}:run"

    oauth_token {
      service_account_email = google_service_account.scheduler[0].email
    }
  }
}
