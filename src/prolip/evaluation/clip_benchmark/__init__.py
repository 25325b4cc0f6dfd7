"""`prolip eval clip-benchmark`: clip_benchmark with our models in it, and patches of what breaks in its 1.6.2."""
