"""Two controllers and what they share: who leads, is the other one ready, and drills. See docs/failover.md."""
