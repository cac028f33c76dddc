"""The network between nodes: discovered, written for Slurm, and compared with what is configured."""
