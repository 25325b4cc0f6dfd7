"""The figures of the ProLIP paper that a checkpoint allows, each a function and a line of one command."""
