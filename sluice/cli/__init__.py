"""The command `sluice`: parsing and printing only; the work is done in the other rooms."""
