variable "project" {
  description = "The project of the workers."
  type        = string
}

variable "region" {
  description = "The region, near the leader region of the Spanner instance."
  type        = string
}

variable "name" {
  description = "The name of the worker pool and of its service account."
  type        = string
  default     = "publishworker"

  # An account's name has at most 30 characters, and one ends with -schedule.
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,19}[a-z0-9]$", var.name))
    error_message = "A name has 6 to 21 characters of a-z, 0-9 and -, and begins with a letter."
  }
}

variable "image" {
  description = "The image of the worker, with its tag or digest."
  type        = string
}

variable "settings" {
  description = "The worker's settings: OUTBOX_PROJECT, OUTBOX_INSTANCE, OUTBOX_DATABASE, and others of docs/reference/settings.md."
  type        = map(string)
}

variable "instances" {
  description = "The number of workers: 2 or more, so that one is left while another one is replaced. 0 for no worker pool, if `drain_schedule` is enough."
  type        = number
  default     = 2
}

variable "cpu" {
  description = "The CPUs of a worker. It uses at most one."
  type        = string
  default     = "1"
}

variable "memory" {
  description = "The memory of a worker."
  type        = string
  default     = "512Mi"
}

variable "launch_stage" {
  description = "BETA, as long as worker pools are a preview. By default, that of the provider."
  type        = string
  default     = null
}

variable "deletion_protection" {
  description = "Whether Terraform refuses to delete the worker pool and the job."
  type        = bool
  default     = false
}

variable "drain_schedule" {
  description = "When a job drains the outbox, in the format of cron and in UTC, such as */5 * * * *. null for no job."
  type        = string
  default     = null
}

variable "drain_deadline" {
  description = "The seconds after which a drain stops. Make it shorter than the interval of the schedule."
  type        = number
  default     = 240
}
