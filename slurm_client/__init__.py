"""The one way to Slurm from Python."""
