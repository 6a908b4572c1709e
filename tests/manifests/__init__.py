"""The files of k8s/, without a cluster and without a container engine."""
