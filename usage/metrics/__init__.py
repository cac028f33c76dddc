"""Metrics: what is measured on nodes and controllers, told to a time-series database and to Prometheus."""
