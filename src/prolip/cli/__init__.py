"""The command `prolip`: parsing and printing. No other package imports this one."""
