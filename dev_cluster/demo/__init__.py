"""The main job on a cluster on this machine, as `make demo` shows it: one module a chapter."""
