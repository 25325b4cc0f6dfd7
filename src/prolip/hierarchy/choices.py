"""What is left to choose in traversals and in pictures at levels; the command line shows it without torch."""

#: Steps from the caption nearest to an image to its root.
STEPS = 50
#: What a traversal ends in: the most inclusive caption averaged with "", or "" alone.
ROOTS = ("included", "empty")
#: Measures of "includes most".
INCLUSIONS = ("log_inclusion", "inclusion_test")
#: The score of the model's method, in place of one of them.
OWN = "own"
#: Pixels that every segment of a picture at levels exceeds.
LEAST = 5000
