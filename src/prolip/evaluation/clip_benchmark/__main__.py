"""`python -m prolip.evaluation.clip_benchmark` is `prolip-clip-benchmark`."""
import sys

from prolip.evaluation.clip_benchmark.command import main

sys.exit(main())
