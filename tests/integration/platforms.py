"""Machines of simulated GPUs that several modules make their clusters of."""

from pathlib import Path

import gpu_sim

SINGLE = (Path(gpu_sim.__file__).with_name("platforms") / "h100x1.yaml").read_text()
