"""What a run will take before it is started: time, cost, memory, traffic, input, failures. See docs/scaling.md.

models.py counts the model on the meta device, memory.py, traffic.py, supply.py (the loader's side) and failures.py are
formulas, simulate.py plays steps through event by event, published.py and measured.py compare with runs that were done.
"""
