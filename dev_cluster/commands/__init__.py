"""`sluice cluster` and `sluice sim`."""
