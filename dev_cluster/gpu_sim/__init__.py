"""Simulated vendor drivers with the real C ABI: hardware for development and tests only."""
