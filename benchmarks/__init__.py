"""python -m benchmarks.<name>: what this repository claims, measured. The thread policy is set before torch loads."""

from e3fast.machine import set_threads

set_threads()
