"""`python -m prolip.evaluation.clip_benchmark` is `prolip-clip-benchmark`."""
from prolip.evaluation.clip_benchmark.command import script

if __name__ == "__main__":
    script()
