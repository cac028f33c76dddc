"""`sluice web`: the REST API. It has the snapshot of the controllers' daemon, and no right in Slurm."""
