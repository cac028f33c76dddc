"""Metrics of the whole cluster, from the controller that leads."""
