"""Budgets of watts on the controllers: what is drawn, the caps that keep it, and what slurmctld's planner reads."""
