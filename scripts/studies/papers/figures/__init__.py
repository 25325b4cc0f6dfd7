"""The figures of the ProLIP paper that a checkpoint can reproduce: a function each, and one command."""
