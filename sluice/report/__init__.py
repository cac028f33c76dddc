"""Reports of what was used, from the accounting database and the jobs' records."""
