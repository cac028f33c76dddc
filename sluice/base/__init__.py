"""What all rooms share: errors, files, subprocesses, hostlists, sizes. Uses no other room."""
