"""A whole Slurm cluster on this machine, with real daemons."""
