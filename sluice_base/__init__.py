"""Common ground of all rooms: errors, files, subprocesses, hostlists, sizes. Knows no other room."""
