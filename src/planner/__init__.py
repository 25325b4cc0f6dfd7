"""What a run will take before it is started: time, cost, memory, traffic, input, failures. See docs/scaling.md."""
