"""Passes, one file each; the file name registers the pass. See :class:`trimtab.core.technique.Pass`."""
