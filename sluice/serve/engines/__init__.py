"""The programs that run models: one small file an engine, with its command line, its figures and what it can do."""
