"""`prolip eval clip-benchmark`: clip_benchmark with our models in it.

encoder.py makes our models look as clip_benchmark wants them; repairs.py mends what breaks in clip_benchmark 1.6.2;
checks.py finds wrong input before work starts; command.py runs it.
"""
