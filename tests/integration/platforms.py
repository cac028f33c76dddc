"""Machines of simulated GPUs that several modules make their clusters of."""

from pathlib import Path

import gpu_sim

SINGLE = (Path(gpu_sim.__file__).with_name("platforms") / "h100x1.yaml").read_text()

PAIR = """
name: pair
description: two H100
cpu: {sockets: 1, cores_per_socket: 56, threads_per_core: 2, numa_nodes: 1, memory_mib: 524288}
drivers:
  nvidia: {version: 550.90.07, library: 12.550.90.07, runtime: 12040}
gpus:
  - {model: h100-sxm5-80gb, pci: '0000:1b:00.0', numa: 0, under: 'pci0000:15/0000:15:01.0'}
  - {model: h100-sxm5-80gb, pci: '0000:2b:00.0', numa: 0, under: 'pci0000:25/0000:25:01.0'}
"""
