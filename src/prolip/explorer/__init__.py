"""A local page to search, map and curate a gallery of Gaussians, and to follow paths in it: `prolip explore`."""
