"""The format of an index on disk, beside `prolip.search.store`: its sorted keys, and what became of earlier formats."""
