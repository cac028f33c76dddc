"""The node's side of power: caps of GPUs, what is restored when they end, and reports to the controllers."""
