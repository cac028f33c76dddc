"""Alerts: rules of the policy, looked at by the controllers' daemon, and messages that reach somebody."""
