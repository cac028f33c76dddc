"""The gateway: the OpenAI API before the replicas of services."""
