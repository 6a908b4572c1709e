"""The certificate of an audit, and its check without Spark. No other job imports it."""
