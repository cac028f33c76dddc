"""Alerts: rules of the policy, evaluated by the controllers' daemon, and messages to the site's sinks."""
