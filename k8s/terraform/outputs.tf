output "worker" {
  description = "The identity of the worker, for further roles."
  value       = local.worker
}

output "console" {
  description = "The identity of the console, for further roles."
  value       = local.console
}

output "subscribers" {
  description = "The e-mail address of each subscriber's account, by subscription."
  value       = { for name, account in google_service_account.subscribers : name => account.email }
}

output "pipeline" {
  description = "The identity of the Spark jobs, for further roles."
  value       = local.pipeline
}

output "jobs" {
  description = "The identity of Jobs that run an outbox command, for further roles."
  value       = local.jobs
}
