"""What a run takes before it is started: time, cost, memory, traffic, input, phases, failures. See docs/scaling.md."""
