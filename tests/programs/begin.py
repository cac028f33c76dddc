"""How Python programs that use a GPU begin: the text of cuda.py, cudart.py or hip.py, to which a test adds its own.

KERNEL follows CUDART.
"""

from pathlib import Path

_NAMES = ("cuda.py", "cudart.py", "cudart_kernel.py", "hip.py")
CUDA, CUDART, KERNEL, HIP = (Path(__file__).with_name(name).read_text() for name in _NAMES)
