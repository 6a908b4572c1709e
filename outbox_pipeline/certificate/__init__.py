"""The certificate of an audit, and its check without Spark. Only the job `audit` imports it."""
