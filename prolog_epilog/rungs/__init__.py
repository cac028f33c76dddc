"""The rungs that hold a job to its GPU memory, the strongest first: MIG, driver, MPS, limiter, watchdog.

`ladder.Ladder` chooses one for each grant; `base.Rung` is what each of them can do; docs/enforcement.md.
"""
