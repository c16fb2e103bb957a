"""Backends, one file each; the file name registers the backend. See :class:`trimtab.core.backend.Backend`."""
