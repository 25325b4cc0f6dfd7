"""Estimates of a run before it starts: time, cost, memory, traffic, input, failures (docs/benchmarks/planner.md)."""
