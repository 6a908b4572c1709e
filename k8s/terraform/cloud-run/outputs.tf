output "worker" {
  description = "The IAM member of the workers and of the drain: the variable `worker` of the module above."
  value       = google_service_account.worker.member
}
