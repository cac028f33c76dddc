"""The live view of a cluster: what is shown, and how; `admin_cli.top` draws it on a terminal."""
