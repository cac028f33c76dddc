"""Multi-tenant, multi-vendor GPU scheduling on Slurm. The rooms and which may import which: docs/architecture.md."""
