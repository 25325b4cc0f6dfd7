"""A local page on which a gallery of Gaussians is asked, walked, mapped and curated: `prolip explore`."""
