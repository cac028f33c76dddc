"""How Python programs that use a GPU begin: the text of cuda.py, cudart.py or hip.py, to which a test adds its own."""

from pathlib import Path

CUDA, CUDART, HIP = (Path(__file__).with_name(name).read_text() for name in ("cuda.py", "cudart.py", "hip.py"))
