"""`prolip eval clip-benchmark`: clip_benchmark with our models in it.

encoder.py makes our models look as clip_benchmark expects; patches.py replaces what breaks in clip_benchmark 1.6.2;
command.py checks what was asked for and runs it.
"""
