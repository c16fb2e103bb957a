"""Processes: workers, fork servers, what they are handed, the jobs that they run, baseline servers."""
