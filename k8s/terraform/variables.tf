variable "project" {
  description = "The project of the database, the topics and the cluster."
  type        = string
}

variable "project_number" {
  description = "The number of the project, which is part of the worker's identity."
  type        = string
}

variable "instance" {
  description = "The Spanner instance. It and the database exist already."
  type        = string
}

variable "database" {
  description = "The database with the outbox's tables."
  type        = string
}

variable "namespace" {
  description = "The namespace of the worker's pods, as in k8s/overlays/production."
  type        = string
  default     = "outbox"
}

variable "applications" {
  description = "IAM members that register tasks, such as serviceAccount:shop@my-project.iam.gserviceaccount.com."
  type        = set(string)
  default     = []
}

variable "operators" {
  description = "IAM members that run the outbox commands, such as group:on-call@example.com."
  type        = set(string)
  default     = []
}

variable "viewers" {
  description = "IAM members that run the outbox commands that only read, without messages."
  type        = set(string)
  default     = []
}

variable "console_actions" {
  description = "Whether the console has OUTBOX_ALLOW_ACTIONS=true or OUTBOX_SHOW_DATA=true."
  type        = bool
  default     = false
}

variable "topics" {
  description = "The topics, and for each its subscriptions. A name of a subscription becomes a part of an account's name."
  type        = map(set(string))

  # Pub/Sub refuses shorter names, and names that begin with goog. An account's name has at most 30 characters.
  validation {
    condition     = alltrue([for name in flatten(values(var.topics)) : can(regex("^[a-z][-a-z0-9]{1,24}[a-z0-9]$", name)) && !startswith(name, "goog")])
    error_message = "A subscription has 3 to 26 characters of a-z, 0-9 and -, begins with a letter, and does not begin with goog."
  }

  validation {
    condition     = length(flatten(values(var.topics))) == length(distinct(flatten(values(var.topics))))
    error_message = "A subscription has one topic. Give each subscription its own name."
  }
}

variable "publishers" {
  description = "IAM members that may also publish to the topics, without the outbox. All others lose the role."
  type        = set(string)
  default     = []
}

variable "max_delivery_attempts" {
  description = "Deliveries after which Pub/Sub forwards a message to the dead-letter topic: 5 to 100."
  type        = number
  default     = 10

  validation {
    condition     = var.max_delivery_attempts >= 5 && var.max_delivery_attempts <= 100
    error_message = "Pub/Sub allows 5 to 100."
  }
}

variable "kms_key_name" {
  description = "The Cloud KMS key of the topics, or null. Pub/Sub's service agent must be allowed to use it."
  type        = string
  default     = null
}

variable "env" {
  description = "The environment in Datadog, or null for no dashboard and monitors."
  type        = string
  default     = null
}

variable "docs_url" {
  description = "Where your team reads the folder docs; the monitors link to the runbook there."
  type        = string
  default     = "https://github.com/my-org/outbox/blob/main/docs"
}
