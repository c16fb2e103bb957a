"""Helpers that know neither torch nor trimtab's nouns: JSON, text of errors, validation, files, locks, the registry."""
