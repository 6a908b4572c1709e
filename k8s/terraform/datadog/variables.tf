variable "project" {
  description = "The project of the subscriptions."
  type        = string
}

variable "env" {
  description = "The environment, `DD_ENV` of the workers."
  type        = string
}

variable "service" {
  description = "The service, `DD_SERVICE` of the workers: the `service` of the module above."
  type        = string
  default     = "publishworker"
}

variable "pipeline_account" {
  description = "The service of the Spark jobs: the `pipeline_account` of the module above."
  type        = string
  default     = "outbox-pipeline"
}

variable "docs_url" {
  description = "Where your team reads the folder docs; the monitors link to the runbook there."
  type        = string
  default     = "https://github.com/my-org/outbox/blob/main/docs"
}
