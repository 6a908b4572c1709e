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

variable "service" {
  description = "The name of the release, which is the worker's Kubernetes service account. Each release of a project has its own."
  type        = string
  default     = "publishworker"
}

variable "namespace" {
  description = "The namespace of the worker's pods, as in k8s/overlays/production."
  type        = string
  default     = "outbox"
}

variable "worker" {
  description = "The IAM member of a worker that does not run on GKE, such as a Google service account on Cloud Run. By default, the Kubernetes service account `service`."
  type        = string
  default     = null
}

variable "console_account" {
  description = "The Kubernetes service account of the console."
  type        = string
  default     = "outbox-console"
}

variable "job_account" {
  description = "The Kubernetes service account of Jobs that run an outbox command."
  type        = string
  default     = "publishworker-job"
}

variable "applications" {
  description = "IAM members that register tasks, by names of your choice: { shop = \"serviceAccount:shop@my-project.iam.gserviceaccount.com\" }. The members may be attributes of other resources, the names may not."
  type        = map(string)
  default     = {}
}

variable "operators" {
  description = "IAM members that run the outbox commands, by names of your choice: { on-call = \"group:on-call@example.com\" }."
  type        = map(string)
  default     = {}
}

variable "viewers" {
  description = "IAM members that run the outbox commands that only read, without messages, by names of your choice. An operator is also a viewer, so name a member once."
  type        = map(string)
  default     = {}
}

variable "jobs" {
  description = "Whether Jobs with the account `job_account` may do what operators may."
  type        = bool
  default     = false
}

variable "spark" {
  description = "Whether the Spark jobs have the database role outbox_pipeline."
  type        = bool
  default     = false
}

variable "pipeline" {
  description = "The IAM member of the Spark jobs, if they do not run on GKE, such as the service account of Dataproc. By default, the Kubernetes service account `pipeline_account`."
  type        = string
  default     = null
}

variable "pipeline_namespace" {
  description = "The namespace of the Spark jobs, as in k8s/spark."
  type        = string
  default     = "outbox-pipeline"
}

variable "pipeline_account" {
  description = "The Kubernetes service account of the Spark jobs."
  type        = string
  default     = "outbox-pipeline"
}

variable "pipeline_drains" {
  description = "Whether the Spark job drain may publish to the topics."
  type        = bool
  default     = false
}

variable "buckets" {
  description = "The buckets of the Spark jobs, by names of your choice: { archive = \"my-archive\" }."
  type        = map(string)
  default     = {}
}

variable "inbox" {
  description = "Whether the subscribers have their inbox in this database."
  type        = bool
  default     = false
}

variable "subscriber_prefix" {
  description = "The names of the subscribers' accounts begin with it. They are unique in a project."
  type        = string
  default     = "sub-"
}

variable "console_actions" {
  description = "Whether the console has OUTBOX_ALLOW_ACTIONS=true or OUTBOX_SHOW_DATA=true."
  type        = bool
  default     = false
}

variable "topics" {
  description = "The topics, and for each its subscriptions. A name of a subscription becomes a part of an account's name. They are unique in a project."
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
