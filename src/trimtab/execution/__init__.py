"""Processes: workers, fork servers, transfer of workloads, jobs, baseline servers."""
