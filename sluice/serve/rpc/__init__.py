"""The gRPC door: inference by the gateway of this host, jobs by the REST API, each with the proof of the caller."""
