"""Metrics: what is measured on nodes and controllers, sent to a time-series database and shown to Prometheus."""
