"""Findings, one file each: the file name registers it. See :class:`trimtab.core.check.Check`."""
