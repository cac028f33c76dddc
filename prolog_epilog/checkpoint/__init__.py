"""Saves batch jobs as they run, and resumes them: sluice-launch asks (native/launch), CRIU does it.

images.py keeps what was saved, encrypted; contents.py says what may be in it; criu.py runs CRIU; gpus.py takes
off and puts back what a job has on GPUs, with the vendor's way in a file of its own (cuda.py); opened.py looks what a
resumed job has open, and which rights; saver.py answers requests. drains.py moves images to storage that
nodes share (shared.py), from which jobs go on on other nodes; cpus.py says which CPUs are alike.
"""
