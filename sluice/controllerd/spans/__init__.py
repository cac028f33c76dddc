"""A job's life as an OpenTelemetry trace, from records that are written anyway."""
