"""The REST API for programs: `sluice.client.models` has its types."""
