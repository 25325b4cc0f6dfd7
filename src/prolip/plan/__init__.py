"""Estimate a run before it starts: time, cost, memory, traffic, input, phases, failures (docs/benchmarks/planner.md)."""
