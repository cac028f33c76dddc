"""The live view of a cluster: what is shown, and how; `sluice.cli.top` draws it on a terminal."""
