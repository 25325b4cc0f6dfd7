"""DataComp's evaluation suite: 38 tasks, two sets of faces and five averages, next to the paper's rows."""
