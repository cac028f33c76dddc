"""`sluice replicad`: keeps as many replicas of each service as are wanted."""
