"""Profiles of jobs: what their processes did with GPUs, collected from the job's nodes and put on one time line.

Everything here runs as the job's user; the files are what that user's processes wrote
(native/include/sluice/profile.h).
"""
