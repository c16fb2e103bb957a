"""Techniques, one file each: the file name registers it. See :class:`trimtab.core.technique.Pass`."""
