"""Machines of simulated GPUs that several modules make their clusters of."""

SINGLE = """
name: single
description: one H100, so that all jobs share it
cpu: {sockets: 1, cores_per_socket: 56, threads_per_core: 2, numa_nodes: 1, memory_mib: 524288}
drivers:
  nvidia: {version: 550.90.07, library: 12.550.90.07, runtime: 12040}
gpus:
  - {model: h100-sxm5-80gb, pci: '0000:1b:00.0', numa: 0, under: 'pci0000:15/0000:15:01.0'}
"""
