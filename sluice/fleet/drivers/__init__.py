"""Drivers that come with Sluice, one file each; found by entry points."""
