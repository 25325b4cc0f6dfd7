"""DataComp's evaluation suite: 38 tasks and two sets of faces, five averages, the paper's rows beside them."""
