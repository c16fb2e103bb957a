"""Checks, one file each; the file name registers the check. See :class:`trimtab.core.check.Check`."""
