"""`prolip eval clip-benchmark`: clip_benchmark with our models, and patches for errors in its version 1.6.2."""
