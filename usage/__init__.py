"""What was used: metrics, job summaries, sacct-style reports, alerts."""
